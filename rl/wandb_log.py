"""wandb as a copy of metrics.jsonl: it never asks, never stops a run and hardly ever delays one.

All that wandb does happens on a thread of its own. A run waits for it twice: START_S at most for its start, whose id a
resumed run needs, and FINISH_S at most at the end, for what is still to be sent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts import first_line

log = logging.getLogger(__name__)

START_S = FINISH_S = 60.0
SERVICE = "wandb-core"  # the process that does wandb's sending


class WandbLog:
    """A wandb run, or nothing when wandb is disabled or has failed once."""

    def __init__(self, mode: str, project: str, name: str, folder: Path, config: Mapping, run_id: str | None):
        self._run: Any = None
        self.id = run_id
        self.mode = resolve_mode(mode)
        self._works = self.mode != "disabled"
        self._waiting: queue.SimpleQueue[tuple[str, Callable[[], Any], threading.Event]] = queue.SimpleQueue()
        if self._works:
            threading.Thread(target=self._work, daemon=True).start()  # a daemon: no exit waits for it
            self._do("start", lambda: self._start(project=project, name=name, dir=folder, config=dict(config)), START_S)

    def _start(self, **settings: Any) -> None:
        import wandb

        if (home := os.path.expanduser("~")) != "~":  # of the account, where a container or a service manager sets none
            os.environ.setdefault("HOME", home)
        run = wandb.init(
            **settings,
            id=self.id,
            mode=self.mode,  # type: ignore[arg-type]  # WANDB_MODE may say anything: wandb itself refuses it
            resume="allow" if self.id else None,
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

    def conclude(self, summary: Mapping[str, float]) -> None:
        """What a row of wandb's table of runs shows."""
        self._do("set its summary", lambda: self._run.summary.update(dict(summary)))

    def finish(self, exit_code: int = 0) -> None:
        self._do("finish", lambda: self._run.finish(exit_code=exit_code), FINISH_S)
        self._works = False

    def _do(self, what: str, act: Callable[[], Any], wait_s: float | None = None) -> None:
        """Have it done on the thread, unless wandb has failed before; with `wait_s` wait that long for its end."""
        if not self._works:
            return
        done = threading.Event()
        self._waiting.put((what, act, done))
        if wait_s is not None and not done.wait(wait_s):
            self._works = False
            log.warning("wandb did not %s within %.0f s; metrics.jsonl has everything", what, wait_s)
            _end_service()

    def _work(self) -> None:
        while True:
            what, act, done = self._waiting.get()
            try:
                if self._works:
                    act()
            except Exception as error:
                if self._works:
                    log.warning("wandb could not %s (%s); metrics.jsonl has everything", what, first_line(error))
                self._works = False
            done.set()


def _end_service() -> None:
    """Kill wandb's hung process: the hook that wandb has put into the program's exit would wait for it for ever."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(OSError):
                if Path("/proc", child, "comm").read_text().strip() == SERVICE:
                    os.kill(int(child), signal.SIGKILL)

    def take_back_the_hook() -> None:
        import wandb

        with contextlib.suppress(Exception):  # its process is gone
            wandb.teardown()

    undoing = threading.Thread(target=take_back_the_hook, daemon=True)
    undoing.start()
    undoing.join(5.0)


def resolve_mode(mode: str) -> str:
    """`auto` is online when a wandb login exists on this machine, else offline."""
    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if has_login() else "offline")


def has_login() -> bool:
    """Whether wandb could go online without asking for a key."""
    path = Path(os.environ.get("NETRC", os.path.expanduser("~/.netrc")))
    try:
        return bool(os.environ.get("WANDB_API_KEY")) or "api.wandb.ai" in path.read_text(errors="replace")
    except OSError:
        return False
