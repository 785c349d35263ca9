"""Episodes as MP4 files."""

from collections.abc import Sequence
from pathlib import Path

import imageio.v2 as imageio
import numpy as np

FRAMES_PER_SECOND = 20  # LIBERO's control rate: videos play in real time


def write_video(path: Path, frames: Sequence[np.ndarray]) -> None:
    """Write frames (H, W, 3) uint8, one per env step, as H.264."""
    path.parent.mkdir(exist_ok=True)
    with imageio.get_writer(path, fps=FRAMES_PER_SECOND, macro_block_size=16, ffmpeg_log_level="error") as writer:
        for frame in frames:
            writer.append_data(frame)  # type: ignore[attr-defined]  # imageio's type here is what readers share
