"""The settings of eval.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from configs.bounds import NonNegativeInt, PositiveFloat, PositiveInt, Seed, check_fields
from configs.sections import ModelConfig, SimulatorConfig, TaskIds
from contracts import BadInput
from envs.tasks import PLUS_CHANGES, PUBLISHED_SUITES, split_suite
from vla.load_options import Mode


@dataclass(frozen=True)
class EvalConfig:
    """Measure the success rate of a checkpoint on LIBERO tasks.

    By default this is the published protocol: all tasks of a suite, one greedy episode from each of the 50 official
    initial states.

    Most used:
    --checkpoint PATH_OR_HUB_ID: what to measure
    --task-suite SUITE ..., --task-ids ID ..., --trials N: on which tasks, in how many episodes of each
    --compare-with CHECKPOINT_OR_RESULTS: against what, on the same episodes
    --out FILE.json: where the results go; an interrupted evaluation goes on by the same command
    --video failures: what went wrong
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    simulator: SimulatorConfig = field(default_factory=SimulatorConfig)
    # Another checkpoint, or an earlier results file (*.json), to compare with on the same episodes (None: no
    # comparison).
    compare_with: str | None = None
    # Suites to play. all: libero_spatial, libero_object, libero_goal and libero_10, as in published tables. Other
    # suites: libero_90, and those of LIBERO-PRO and LIBERO-Plus (docs/PUBLISHED_ROBUSTNESS.md), which are named after
    # these four: libero_spatial_swap (also _lan, _task, _object), libero_spatial_camera (also _robot, _language,
    # and _noise) and libero_spatial_plus (all four).
    task_suite: Annotated[tuple[str, ...], Field(min_length=1)] = ("libero_spatial",)
    # Task ids within each suite (None: all).
    task_ids: Annotated[tuple[NonNegativeInt, ...] | None, TaskIds] = None
    # Episodes of each task in each mode, each from another initial state; fewer if there are not so many states.
    trials: PositiveInt = 50
    # Id of the first initial state of every task.
    first_init_state: NonNegativeInt = 0
    # official: LIBERO's 50 initial states of each task. fresh: LIBERO's placement sampler draws states from the
    # seeds 0, 1, ..., as many as --trials says, so that smaller differences can be shown; training draws from other
    # seeds. both: the official ones, then fresh ones, --trials in all.
    init_states: Literal["official", "fresh", "both"] = "official"
    # How the policy decides; several modes are played on the same states. greedy: the most likely tokens, as in
    # published results (with --l1-student laplace the L1 head's actions, rounded); median: the medians of its token
    # distributions, which can succeed far more often where these are wide; sample: drawn; l1: the L1 head (None: l1
    # if a pretrained checkpoint has an L1 head, else greedy).
    mode: Annotated[tuple[Mode, ...], Field(min_length=1)] | None = None
    # Sampling temperature: the policy's logits are divided by it (None: 1 with --mode sample).
    temperature: PositiveFloat | None = None
    # Seed of sampling.
    seed: Seed = 0
    # What the policy is told in LIBERO-Plus. clean: LIBERO's instruction, or the paraphrase of a language variant;
    # leaked: with the numbers of the change at its end, as in the published figures.
    prompt: Literal["clean", "leaked"] = "clean"
    # Results file, *.json (docs/RESULTS_JSON.md; None: a new one in runs/). If it exists, the same command plays only
    # the episodes that it lacks.
    out: str | None = None
    # Episodes whose videos are kept, in a folder beside the results file. Recording is slower, because every env step
    # is rendered.
    video: Literal["none", "failures", "all"] = "none"

    def __post_init__(self) -> None:
        for section in (self, self.model, self.simulator):
            check_fields(section)
        if self.out is not None and not self.out.endswith(".json"):
            # Pictures and videos are named after the results file, with other endings.
            raise BadInput(f"--out {self.out}: results are a JSON file: give a name that ends in .json")
        if self.simulator.bddl_file is not None and (
            len(self.suites) > 1 or self.task_ids not in (None, (0,))
        ):
            raise BadInput("--bddl-file names one task: give one --task-suite and no --task-ids")
        if self.temperature is not None and "sample" not in (self.mode or ()):
            raise BadInput("--temperature is that of --mode sample: give that mode, too")
        changes = [split_suite(suite)[1] for suite in self.suites]
        if self.init_states != "official" and not set(changes).isdisjoint(PLUS_CHANGES):
            raise BadInput(
                f"--init-states {self.init_states}: LIBERO-Plus numbers its variants like initial states: leave it out"
            )
        if self.prompt == "leaked" and not set(changes) <= set(PLUS_CHANGES):
            raise BadInput(
                "--prompt leaked is for the suites of LIBERO-Plus alone: evaluate others by another command"
            )

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites of --task-suite, each once."""
        suites: list[str] = []
        for suite in self.task_suite:
            suites.extend(PUBLISHED_SUITES if suite == "all" else [suite])
        return tuple(dict.fromkeys(suites))
