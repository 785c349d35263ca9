"""The settings of eval.py; the field docstrings are the text of `--help`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from configs.cli import parse_flags
from configs.config import Suite
from errors import BadInput


@dataclass(frozen=True)
class EvalConfig:
    """Measure the success rate of a checkpoint on LIBERO tasks."""

    checkpoint: str = ""
    """Folder or hub id of a checkpoint, or the folder of a trained adapter (RUN/checkpoints/best)."""
    task_suite: Suite = "libero_spatial"
    """LIBERO suite."""
    task_ids: Annotated[tuple[int, ...] | None, tyro.conf.arg(aliases=["--task-id"])] = None
    """Task ids within the suite (default: all)."""
    bddl_file: str | None = None
    """A BDDL file of your own in place of a task of the suite."""
    trials: int = 50
    """Episodes per task; more than a task has initial states starts over with the first."""
    first_init_state: int = 0
    """Initial state of the first trial (40: the states that training leaves out by default)."""
    mode: Literal["auto", "greedy", "sample", "l1"] = "auto"
    """How the policy decides: greedy or sampled action tokens, or the L1 head. auto: sample when --temperature is
    given, the L1 head of a pretrained checkpoint that ships one, else greedy."""
    temperature: float | None = None
    """Sampling temperature."""
    unnorm_key: str | None = None
    """Key of the dataset statistics (default: found from the suite's name)."""
    num_envs: int = 1
    """Simulators: 1 steps inline, N > 1 run in worker processes."""
    max_batch: int | None = None
    """Observations that the policy decides on together at most (default: all that wait); fewer need less memory."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly` (ours, no download), `official`, or a folder; the environment variable
    LIBERO_ASSETS names a folder in place of lowpoly."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs."""
    data_parallel: bool = False
    """Use every visible GPU: each decides its share of every batch (with --num-envs of 2 or more)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights."""
    seed: int = 0
    """Seed of sampling."""
    out: str | None = None
    """Write every episode and the table to this JSON file."""
    video: str | None = None
    """Folder for one video per task (its first episode)."""

    def __post_init__(self) -> None:
        for flag, value in (("--trials", self.trials), ("--num-envs", self.num_envs), ("--max-batch", self.max_batch)):
            if value is not None and value < 1:
                raise BadInput(f"{flag} must be at least 1, got {value}")
        if self.first_init_state < 0:
            raise BadInput(f"--first-init-state must not be negative, got {self.first_init_state}")
        if self.temperature is not None and (self.temperature <= 0 or self.mode in ("greedy", "l1")):
            raise BadInput(f"--temperature {self.temperature} needs to be positive, and --mode sample")


def parse_eval(argv: Sequence[str]) -> EvalConfig:
    config = parse_flags(EvalConfig, argv, prog="eval.py", default=EvalConfig())
    if not config.checkpoint:
        raise BadInput("--checkpoint is missing: name a folder or a hub id (see --help)")
    return config
