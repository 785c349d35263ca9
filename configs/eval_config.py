"""The settings of eval.py; the field docstrings are the text of `--help`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from command_line import parse_flags
from configs.experience import Suite
from errors import BadInput

# Those of the published tables.
PUBLISHED_SUITES: tuple[Suite, ...] = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
PUBLISHED_TRIALS = 50


@dataclass(frozen=True)
class EvalConfig:
    """Measure the success rate of a checkpoint on LIBERO tasks."""

    checkpoint: str = ""
    """Folder or hub id of a checkpoint, or the folder of a trained adapter (RUN/checkpoints/best)."""
    compare_with: str | None = None
    """Another checkpoint, or a results file of an earlier evaluation (*.json): the success before (None: no
    comparison). Both are compared on the episodes that both played."""
    protocol: Literal["libero"] | None = None
    """libero: the published protocol (all tasks, 50 initial states each, one greedy episode from each, the suite's
    episode cap). Flags that contradict it are refused. None: what the other flags say."""
    task_suite: tuple[Suite | Literal["all"], ...] = ("libero_spatial",)
    """LIBERO suites, one after the other; all: spatial, object, goal and 10, the four of the published tables."""
    task_ids: Annotated[tuple[int, ...] | None, tyro.conf.arg(aliases=["--task-id"])] = None
    """Task ids within each suite (None: all)."""
    bddl_file: str | None = None
    """A BDDL file of your own in place of the tasks of the suite (see docs/OWN_TASKS.md; None: those)."""
    trials: int = PUBLISHED_TRIALS
    """Episodes per task; more than a task has initial states starts over with the first."""
    first_init_state: int = 0
    """Id of the initial state of the first trial (40: the states that training leaves out by default)."""
    mode: Literal["auto", "greedy", "sample", "l1"] = "auto"
    """How the policy decides: greedy or sampled action tokens, or the L1 head. auto: sample when --temperature is
    given, the L1 head of a pretrained checkpoint that ships one, else greedy."""
    temperature: float | None = None
    """Sampling temperature, by which the policy's logits are divided (None: 1, where --mode is sample)."""
    unnorm_key: str | None = None
    """Key of the dataset statistics (None: found from the suite's name)."""
    num_envs: int = 1
    """Simulators: 1 steps inline, N > 1 run in worker processes."""
    max_batch: int | None = None
    """Observations that the policy decides on together at most (None: all that wait); fewer need less memory."""
    assets: str = "lowpoly"
    """What objects look like: `lowpoly` (ours, no download), `official`, or a folder; the environment variable
    LIBERO_ASSETS names a folder in place of lowpoly."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs (auto: on a GPU if there is one)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the transformer blocks and, on a GPU, record whole passes as CUDA graphs (auto: on a GPU, where a network
    below a billion parameters is recorded only)."""
    data_parallel: bool = False
    """Use every visible GPU: each decides its share of every batch (with --num-envs of 2 or more)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights (auto: bfloat16 on a GPU, float32 on a CPU)."""
    load_in_4bit: bool = False
    """Store the weights of the language model's blocks in 4 bits (NF4, by the package bitsandbytes): less memory, and
    another policy. An adapter that was trained so is always evaluated so."""
    seed: int = 0
    """Seed of sampling; it changes nothing where the policy is greedy."""
    out: str | None = None
    """Results file (docs/RESULTS_JSON.md), brought up to date after every episode (None: a new one in runs/). The
    same command with the same file goes on where it was stopped."""
    video: Literal["none", "failures", "all"] = "none"
    """Which episodes are kept as videos, in a folder beside the results file. Recording draws every env step."""

    def __post_init__(self) -> None:
        for flag, value in (("--trials", self.trials), ("--num-envs", self.num_envs), ("--max-batch", self.max_batch)):
            if value is not None and value < 1:
                raise BadInput(f"{flag} must be at least 1, got {value}")
        if self.first_init_state < 0:
            raise BadInput(f"--first-init-state must not be negative, got {self.first_init_state}")
        if self.seed < 0:
            raise BadInput(f"--seed must not be negative, got {self.seed}")
        if self.temperature is not None and (self.temperature <= 0 or self.mode in ("greedy", "l1")):
            raise BadInput(f"--temperature {self.temperature} needs to be positive, and --mode sample")
        if not self.task_suite:
            raise BadInput("--task-suite names no suite")
        if self.bddl_file is not None and (len(self.suites) > 1 or self.task_ids not in (None, (0,))):
            raise BadInput("--bddl-file is one task: it goes with one --task-suite (of its cap) and without --task-ids")
        if self.protocol is not None:
            self._check_protocol()

    def _check_protocol(self) -> None:
        contradictions = {
            f"--trials {self.trials}": self.trials != PUBLISHED_TRIALS,
            f"--first-init-state {self.first_init_state}": self.first_init_state != 0,
            f"--temperature {self.temperature}": self.temperature is not None,
            f"--mode {self.mode}": self.mode == "sample",
            "--task-ids": self.task_ids is not None,
            "--bddl-file": self.bddl_file is not None,
        }
        refused = [flag for flag, contradicts in contradictions.items() if contradicts]
        if refused:
            raise BadInput(
                f"--protocol {self.protocol} is all tasks of a suite, {PUBLISHED_TRIALS} initial states each, greedy: "
                f"leave out {', '.join(refused)}, or --protocol"
            )

    @property
    def suites(self) -> tuple[Suite, ...]:
        """The suites that are meant, each once."""
        named = (PUBLISHED_SUITES if suite == "all" else (suite,) for suite in self.task_suite)
        return tuple(dict.fromkeys(suite for suites in named for suite in suites))


def parse_eval(argv: Sequence[str]) -> EvalConfig:
    config = parse_flags(EvalConfig, argv, prog="eval.py")
    if not config.checkpoint:
        raise BadInput("--checkpoint is missing: name a folder or a hub id (see --help)")
    return config
