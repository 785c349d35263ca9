"""Send a copy of metrics.jsonl to wandb. It never asks for a key, and a failure is logged and does not stop the run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from contracts import first_line

if TYPE_CHECKING:  # wandb takes a second to import, and a run without it does not need it
    import wandb

log = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]


class WandbLog:
    """A wandb run. After its first failure, and when it is disabled, it ignores every call."""

    def __init__(
        self, mode: Mode, name: str, folder: Path, config: Mapping[str, object], run_id: str | None = None
    ):
        self.id = run_id  # a checkpoint stores it, so that a resumed run goes on with the same wandb run
        self._run: wandb.Run | None = None
        if resolve_mode(mode) != "disabled":
            with self._failure_is_one_line():
                self._run = start(resolve_mode(mode), name, folder, config, run_id)
                self.id = self._run.id

    def log(self, row: Mapping[str, float | None]) -> None:
        """Send a row of metrics.jsonl."""
        if self._run is not None:
            with self._failure_is_one_line():
                self._run.log(dict(row))

    def finish(self, exit_code: int = 0) -> None:
        """End the wandb run; wandb shows it as failed if `exit_code` is not 0."""
        if self._run is not None:
            with self._failure_is_one_line():
                self._run.finish(exit_code=exit_code)
        self._run = None

    @contextlib.contextmanager
    def _failure_is_one_line(self) -> Iterator[None]:
        """Log an exception of this block in one line, and send nothing to wandb after it."""
        try:
            yield
        except Exception as error:
            self._run = None
            log.warning("wandb failed (%s); metrics.jsonl has all metrics", first_line(error))


def start(mode: str, name: str, folder: Path, config: Mapping[str, object], run_id: str | None) -> wandb.Run:
    """Start a wandb run, or go on with the one of this id."""
    import wandb

    # What was not sent in time stays in the run folder.
    settings = wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60)
    wandb.setup(settings)  # without these settings `init` asks for a key
    run = wandb.init(
        mode=mode,  # type: ignore[arg-type]  # WANDB_MODE may hold anything; wandb checks it
        project=os.environ.get("WANDB_PROJECT", "vla-grpo"),
        name=name,
        dir=folder,
        config=dict(config),
        id=run_id,
        resume="allow" if run_id else None,
        settings=settings,
    )
    run.define_metric("*", step_metric="global_step")
    if run.url:  # of the page that shows the run, if it is online
        log.info("%-14s  %s", "wandb", run.url)
    return run


def resolve_mode(mode: Mode) -> str:
    """Resolve `auto`: the value of WANDB_MODE, else online with a wandb login on this machine, else offline."""
    if mode != "auto":
        return mode
    netrc = Path(os.environ.get("NETRC", os.path.expanduser("~/.netrc")))
    has_login = bool(os.environ.get("WANDB_API_KEY"))
    with contextlib.suppress(OSError):  # there is no such file, or HOME is another user's
        has_login |= b"api.wandb.ai" in netrc.read_bytes()
    return os.environ.get("WANDB_MODE") or ("online" if has_login else "offline")
