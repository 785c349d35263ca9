"""wandb as a copy of metrics.jsonl: it never asks, and what fails there costs one line, never the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from contracts import first_line

log = logging.getLogger(__name__)


class WandbLog:
    """A wandb run, or nothing when wandb is disabled or has failed once."""

    def __init__(self, mode: str, project: str, name: str, folder: Path, config: Mapping, run_id: str | None):
        self.id = run_id
        self._run: Any = None
        mode = resolve_mode(mode)
        self._works = mode != "disabled"
        self._do("start", lambda: self._start(mode=mode, project=project, name=name, dir=folder, config=dict(config)))

    def _start(self, **options: Any) -> None:
        import wandb

        os.environ.setdefault("HOME", str(Path.home()))  # a container or a service manager may set none
        # Seconds; what is not sent by then stays in the folder.
        settings = wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60)
        wandb.setup(settings)  # silent before there is a run, too: it does not ask for a key
        self._run = wandb.init(**options, id=self.id, resume="allow" if self.id else None, settings=settings)
        self.id = self._run.id
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def log(self, record: Mapping[str, Any]) -> None:
        self._do("log", lambda: self._run.log(dict(record)))

    def video(self, name: str, path: Path, global_step: int, caption: str = "") -> None:
        def send() -> None:
            import wandb

            self._run.log({name: wandb.Video(str(path), caption=caption), "global_step": global_step})

        self._do("log a video", send)

    def conclude(self, summary: Mapping[str, float]) -> None:
        """What a row of wandb's table of runs shows."""
        self._do("set its summary", lambda: self._run.summary.update(dict(summary)))

    def finish(self, exit_code: int = 0) -> None:
        self._do("finish", lambda: self._run.finish(exit_code=exit_code))
        self._works = False

    def _do(self, what: str, act: Callable[[], Any]) -> None:
        if not self._works:
            return
        try:
            act()
        except Exception as error:
            self._works = False
            log.warning("wandb could not %s (%s); metrics.jsonl has everything", what, first_line(error))


def resolve_mode(mode: str) -> str:
    """`auto` is what WANDB_MODE says, else online when a wandb login exists on this machine, else offline."""
    if mode != "auto":
        return mode
    netrc = Path(os.environ.get("NETRC", os.path.expanduser("~/.netrc")))
    has_login = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and b"api.wandb.ai" in netrc.read_bytes())
    return os.environ.get("WANDB_MODE") or ("online" if has_login else "offline")
