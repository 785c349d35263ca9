"""The records for TensorBoard, a copy of metrics.jsonl: `tensorboard --logdir runs`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np

from rl.never_fatal import never_fatal

STRIP = 8  # frames that stand for a video


class TensorBoardLog:
    """A TensorBoard writer, or nothing when it is not wanted or has failed once.

    It starts from the records that metrics.jsonl holds: after a resume the curves are those of the run, whatever was
    written before the stop.
    """

    def __init__(self, wanted: bool, folder: Path, rows: Iterable[Mapping[str, Any]] = ()):
        self._writer: Any = None
        if not wanted:
            return
        with self._guarded("start"):
            from torch.utils.tensorboard import SummaryWriter  # needs an optional package

            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
            self._writer = SummaryWriter(str(folder / "tensorboard"))
            rows = list(rows)
            for row in rows:
                self.log(row)
            steps = {row["global_step"] for row in rows}
            for path in sorted((folder / "videos").glob("*-step_*.mp4")):
                actor, _, step = path.stem.rpartition("-step_")
                if int(step) in steps:
                    self.video(f"video/{actor}", path, int(step))

    def log(self, row: Mapping[str, Any]) -> None:
        if self._writer is not None:
            with self._guarded("log"):
                for key, value in row.items():
                    if key != "global_step" and value is not None:
                        self._writer.add_scalar(key, value, row["global_step"])
                self._writer.flush()

    def video(self, name: str, path: Path, global_step: int) -> None:
        """A strip of frames: TensorBoard itself shows no videos."""
        if self._writer is not None:
            with self._guarded("log a video"):
                self._writer.add_image(name, film_strip(path), global_step, dataformats="HWC")
                self._writer.flush()

    def finish(self) -> None:
        if self._writer is not None:
            with self._guarded("finish"):
                self._writer.close()
            self._writer = None

    def _guarded(self, what: str) -> AbstractContextManager[None]:
        return never_fatal(f"TensorBoard could not {what}", "metrics.jsonl has everything", self._give_up)

    def _give_up(self) -> None:
        self._writer = None


def film_strip(video: Path) -> np.ndarray:
    """STRIP frames of a video from the first to the last, side by side: (H, STRIP * W, 3) uint8."""
    frames = iio.imread(video, plugin="FFMPEG")
    chosen = np.linspace(0, len(frames) - 1, STRIP).round().astype(int)
    return np.concatenate(frames[chosen], axis=1)
