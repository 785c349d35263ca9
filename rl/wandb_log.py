"""wandb as a copy of metrics.jsonl: it never asks, never stops a run and hardly ever delays one.

All that wandb does happens in the background. A run waits for it twice: START_S at most for its start, whose id a
resumed run needs, and FINISH_S at most at the end, for what is still to be sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.background import Background

log = logging.getLogger(__name__)

START_S = 60.0
FINISH_S = 60.0
TEARDOWN_S = 5.0
SERVICE = "wandb-core"  # the process that does wandb's sending


class WandbLog:
    """A wandb run, or nothing when wandb is disabled or has failed once."""

    def __init__(self, mode: str, project: str, name: str, folder: Path, config: Mapping, run_id: str | None):
        self._run: Any = None
        self.id = run_id
        self.mode = resolve_mode(mode)
        self._works = self.mode != "disabled"
        if not self._works:
            return
        self._background = Background()
        settings = {"project": project, "name": name, "dir": folder, "config": dict(config), "id": run_id}
        self._do("start", lambda: self._start(settings))
        self._wait("start", START_S)

    def _start(self, settings: Mapping[str, Any]) -> None:
        import wandb

        name_home()
        run = wandb.init(
            **settings,
            mode=self.mode,  # type: ignore[arg-type]  # WANDB_MODE may say anything: wandb itself refuses it
            resume="allow" if settings["id"] else None,
            settings=wandb.Settings(silent=True, init_timeout=30, finish_timeout=FINISH_S, console="off"),
        )
        run.define_metric("global_step")
        run.define_metric("*", step_metric="global_step")
        self._run, self.id = run, run.id

    def log(self, record: Mapping[str, Any]) -> None:
        row = dict(record)
        self._do("log", lambda: self._run.log(row))

    def video(self, name: str, path: Path, global_step: int, caption: str = "") -> None:
        def send() -> None:
            import wandb

            self._run.log({name: wandb.Video(str(path), caption=caption), "global_step": global_step})

        self._do("log a video", send)

    def conclude(self, summary: Mapping[str, float], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Set the run's summary and log tables, each a list of records with equal keys; a Path is shown as a video."""

        def send() -> None:
            import wandb

            self._run.summary.update(dict(summary))
            for name, records in tables.items():
                cells = [
                    [wandb.Video(str(cell)) if isinstance(cell, Path) else cell for cell in record.values()]
                    for record in records
                ]
                self._run.log({name: wandb.Table(columns=list(records[0]), data=cells)})

        self._do("log its tables", send)

    def finish(self, exit_code: int = 0) -> None:
        self._do("finish", lambda: self._run.finish(exit_code=exit_code))
        self._wait("finish", FINISH_S)
        self._works = False

    def _do(self, what: str, act: Callable[[], None]) -> None:
        """Have it done in the background, unless wandb has failed before."""

        def errand() -> None:
            if not self._works:
                return
            try:
                act()
            except Exception as error:
                if self._works:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    log.warning("wandb could not %s (%s); metrics.jsonl has everything", what, reason)
                self._works = False

        if self._works:
            self._background.do(errand)

    def _wait(self, what: str, seconds: float) -> None:
        if self._works and not self._background.finished_within(seconds):
            self._works = False
            log.warning("wandb did not %s within %.0f s; metrics.jsonl has everything", what, seconds)
            end_service()


def name_home() -> None:
    """wandb's process logs below HOME; where a container or a service manager sets none, it writes to the terminal."""
    home = os.path.expanduser("~")  # of the account
    if home != "~":
        os.environ.setdefault("HOME", home)


def end_service() -> None:
    """Kill wandb's hung process: the hook that wandb has put into the program's exit would wait for it for ever."""

    def undo() -> None:  # takes the hook back, and then fails: its process is gone
        import wandb

        wandb.teardown()

    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                if Path("/proc", child, "comm").read_text().strip() == SERVICE:
                    os.kill(int(child), signal.SIGKILL)
    undoing = Background()
    undoing.do(undo)
    undoing.finished_within(TEARDOWN_S)


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
    path = Path(os.environ.get("NETRC", os.path.expanduser("~/.netrc")))
    try:
        return "api.wandb.ai" in path.read_text(errors="replace")
    except OSError:
        return False
