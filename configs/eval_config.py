"""The settings of eval.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from configs.bounds import NOT_NEGATIVE, POSITIVE, check_numbers
from configs.config import ModelConfig, SimulatorConfig, Suite, TaskIds, check_simulator
from contracts import BadInput

PUBLISHED_SUITES: tuple[Suite, ...] = ("libero_spatial", "libero_object", "libero_goal", "libero_10")


@dataclass(frozen=True)
class EvalConfig:
    """Measure the success rate of a checkpoint on LIBERO tasks."""

    model: ModelConfig = field(default_factory=ModelConfig)
    simulator: SimulatorConfig = field(default_factory=SimulatorConfig)
    compare_with: str | None = None
    """Another checkpoint, or an earlier results file (*.json), to be compared on the same episodes (None: nothing)."""
    protocol: Literal["libero"] | None = None
    """libero: the published one, all tasks, a greedy episode from each of 50 initial states (None: as flags say)."""
    task_suite: tuple[Suite | Literal["all"], ...] = ("libero_spatial",)
    """Suites, one after the other; all: spatial, object, goal and 10, the four of the published tables."""
    task_ids: Annotated[tuple[int, ...] | None, NOT_NEGATIVE, TaskIds] = None
    """Task ids within each suite (None: all)."""
    trials: Annotated[int, POSITIVE] = 50
    """Episodes per task, each from another initial state; more than there are: sampled ones start over."""
    first_init_state: Annotated[int, NOT_NEGATIVE] = 0
    """Id of the initial state of the first trial (40: the states that training leaves out by default)."""
    mode: Literal["auto", "greedy", "sample", "l1"] = "auto"
    """How the policy decides (auto: sample with --temperature, l1 for a pretrained L1 head, else greedy)."""
    temperature: Annotated[float | None, POSITIVE] = None
    """Sampling temperature, by which the policy's logits are divided (None: 1, where --mode is sample)."""
    seed: Annotated[int, NOT_NEGATIVE] = 0
    """Seed of sampling and of perturbations; it changes nothing else where the policy is greedy."""
    out: str | None = None
    """Results file (docs/RESULTS_JSON.md; None: a new one in runs/). The same command goes on where it was stopped."""
    video: Literal["none", "failures", "all"] = "none"
    """Which episodes are kept as videos, in a folder beside the results file. Recording draws every env step."""

    def __post_init__(self) -> None:
        for section in (self, self.model, self.simulator):
            check_numbers(section)
        if not self.task_suite:
            raise BadInput("--task-suite names no suite")
        check_simulator(self.simulator, self.suites, self.protocol)
        if self.simulator.bddl_file is not None:
            check_bddl_file(self)
        if self.protocol is not None:
            check_protocol(self)

    @property
    def samples(self) -> bool:
        return self.mode == "sample" or (self.mode == "auto" and self.temperature is not None)

    @property
    def suites(self) -> tuple[Suite, ...]:
        """The suites of --task-suite, each once."""
        suites: list[Suite] = []
        for suite in self.task_suite:
            suites.extend(PUBLISHED_SUITES if suite == "all" else [suite])
        return tuple(dict.fromkeys(suites))


def check_bddl_file(config: EvalConfig) -> None:
    if len(config.suites) > 1 or config.task_ids not in (None, (0,)):
        raise BadInput("--bddl-file is one task: one --task-suite, no --task-ids")


def check_protocol(config: EvalConfig) -> None:
    """The published protocol leaves nothing to choose that changes the result."""
    is_changed = {
        "--trials": config.trials != EvalConfig.trials,
        "--first-init-state": config.first_init_state != EvalConfig.first_init_state,
        "--temperature": config.temperature is not None,
        "--task-ids": config.task_ids is not None,
        "--max-env-steps": config.simulator.max_env_steps is not None,
        "--bddl-file": config.simulator.bddl_file is not None,
        "--mode": config.mode == "sample",
    }
    flags = ", ".join(flag for flag in is_changed if is_changed[flag])
    if flags:
        raise BadInput(
            f"--protocol libero is all tasks of a suite, 50 initial states each, greedy: leave out {flags}"
        )
