"""Write videos of episodes."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import numpy as np

FRAMES_PER_SECOND = 20  # LIBERO's control rate, so a video plays in real time


def video_folder(run_folder: Path, env_steps: int) -> Path:
    """Where the videos of an evaluation in a run are."""
    return run_folder / "videos" / f"step_{env_steps}"


def write_video(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames (H, W, 3) uint8, one per env step, as H.264."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a named format imageio may choose another writer, which does not know these options.
    imageio.mimwrite(  # type: ignore[call-overload]  # its type is a list, but every sequence works
        path,
        frames,
        format="FFMPEG",
        fps=FRAMES_PER_SECOND,
        macro_block_size=16,
        ffmpeg_log_level="error",
    )
