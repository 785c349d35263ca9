"""wandb as a copy of metrics.jsonl: it never asks, never blocks a run and never stops one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rl.never_fatal import never_fatal


class WandbLog:
    """A wandb run, or nothing when wandb is disabled or has failed once."""

    def __init__(self, mode: str, project: str, name: str, folder: Path, config: Mapping, run_id: str | None):
        self._run: Any = None
        self.id = run_id
        self.mode = resolve_mode(mode)
        if self.mode == "disabled":
            return
        with self._guarded("start"):
            import wandb

            self._run = wandb.init(
                project=project,
                name=name,
                dir=folder,
                config=dict(config),
                mode=self.mode,  # type: ignore[arg-type]  # WANDB_MODE may say anything: wandb itself refuses it
                id=run_id,
                resume="allow" if run_id else None,
                settings=wandb.Settings(silent=True, init_timeout=30, console="off"),
            )
            self._run.define_metric("global_step")
            self._run.define_metric("*", step_metric="global_step")
            self.id = self._run.id

    def log(self, record: Mapping[str, Any]) -> None:
        if self._run is not None:
            with self._guarded("log"):
                self._run.log(dict(record))

    def video(self, name: str, path: Path, global_step: int, caption: str = "") -> None:
        if self._run is not None:
            with self._guarded("log a video"):
                import wandb

                self._run.log({name: wandb.Video(str(path), caption=caption), "global_step": global_step})

    def conclude(self, summary: Mapping[str, float], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Set the run's summary and log tables, each a list of records with equal keys; a Path is shown as a video."""
        if self._run is not None:
            with self._guarded("log its tables"):
                import wandb

                self._run.summary.update(dict(summary))
                for name, records in tables.items():
                    cells = [
                        [wandb.Video(str(cell)) if isinstance(cell, Path) else cell for cell in record.values()]
                        for record in records
                    ]
                    self._run.log({name: wandb.Table(columns=list(records[0]), data=cells)})

    def finish(self, exit_code: int = 0) -> None:
        if self._run is not None:
            with self._guarded("finish"):
                self._run.finish(exit_code=exit_code)
            self._run = None

    def _guarded(self, what: str) -> AbstractContextManager[None]:
        return never_fatal(f"wandb could not {what}", "metrics.jsonl has everything", self._give_up)

    def _give_up(self) -> None:
        self._run = None


def resolve_mode(mode: str) -> str:
    """`auto` is online when a wandb login exists on this machine, else offline."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if has_login() else "offline"


def has_login() -> bool:
    """Whether wandb could go online without asking for a key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return "api.wandb.ai" in path.read_text()
    except OSError:
        return False
