"""The whole configuration of training, and which of its settings contradict each other.

Each check raises BadInput with one line that says what to change.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from configs.bounds import check_fields
from configs.sections import (
    CHANGEABLE,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    PhaseConfig,
    RolloutConfig,
    RunConfig,
    SimulatorConfig,
    TaskConfig,
    UpdateConfig,
)
from contracts import BadInput, first_problem
from envs.tasks import PLUS_CHANGES, split_suite


@dataclass(frozen=True)
class TrainConfig:
    """Improve a vision-language-action policy on LIBERO tasks by reinforcement learning."""

    task: TaskConfig = field(default_factory=TaskConfig)
    simulator: SimulatorConfig = field(default_factory=SimulatorConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    phases: PhaseConfig = field(default_factory=PhaseConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        for section in vars(self).values():
            check_fields(section)
        check_init_states(self.task)
        check_loss(self.loss, self.rollout)
        if self.rollout.curriculum and len(self.task.task_ids) == 1:
            raise BadInput("--curriculum chooses among tasks, and there is only one: give several --task-ids")


def check_init_states(task: TaskConfig) -> None:
    """Raise BadInput unless success is measured on initial states that training does not use."""
    for flag, states in (
        ("--train-init-states", task.train_init_states),
        ("--eval-init-states", task.eval_init_states),
    ):
        if states != "fresh" and states[0] >= states[1]:
            raise BadInput(f"{flag} must be FIRST END with FIRST < END, got {states[0]} {states[1]}")
    _, change = split_suite(task.task_suite)
    if change in PLUS_CHANGES and task.train_init_states == "fresh":
        raise BadInput(
            f"{task.task_suite} has a fixed number of variants, which are numbered like initial states: name those to "
            "train on and others to evaluate, for example --train-init-states 0 20 --eval-init-states 20 30"
        )
    if task.train_init_states == "fresh":  # training then uses none of the benchmark's states
        return
    first, end = task.train_init_states
    first_held_out, end_held_out = task.eval_init_states
    if first < end_held_out and first_held_out < end:
        raise BadInput(
            f"--train-init-states {first} {end} and --eval-init-states {first_held_out} {end_held_out} overlap, so "
            "success would be measured on states that were trained on: name others, such as 0 40 and 40 50, or (not in "
            "LIBERO-Plus) use --train-init-states fresh"
        )


def check_loss(loss: LossConfig, rollout: RolloutConfig) -> None:
    """Raise BadInput for an advantage that the other settings cannot compute, or that could ruin the policy."""
    lowest, highest = rollout.group_success_bounds
    if lowest > highest:
        raise BadInput(f"--group-success-bounds must be LOWEST HIGHEST, got {lowest} {highest}")
    compares_episodes = loss.advantage == "group" or rollout.dynamic_sampling
    if compares_episodes and rollout.group_size < 2:
        raise BadInput(
            "--advantage group and --dynamic-sampling compare the episodes of a group: use --group-size 2 or more"
        )
    if loss.advantage != "absolute" and loss.ratio_level == "chunk":
        raise BadInput(
            f"--advantage {loss.advantage} can be negative, and clipping a chunk's mean ratio does not stop the "
            "probability of a single token from falling without bound: add --ratio-level token"
        )


def changeable_on_resume() -> set[str]:
    """The names of the settings that are marked as CHANGEABLE."""
    names: set[str] = set()
    for section in get_type_hints(TrainConfig).values():
        for name, annotation in get_type_hints(section, include_extras=True).items():
            if CHANGEABLE in getattr(annotation, "__metadata__", ()):
                names.add(name)
    return names


def changed(config: TrainConfig, **settings: Any) -> TrainConfig:
    """A copy of `config` with other values for the named fields. As for flags, sections need not be named."""
    sections = {}
    for section_name, section in vars(config).items():
        changes = {name: settings.pop(name) for name in vars(section) if name in settings}
        sections[section_name] = replace(section, **changes)
    if settings:
        raise BadInput(f"no such settings: {', '.join(settings)}")
    return TrainConfig(**sections)


def config_from_json(stored: object) -> TrainConfig:
    """The configuration that config.json holds: `asdict` of it by JSON. Raises BadInput for one of another version."""
    try:
        config = TypeAdapter(TrainConfig).validate_json(json.dumps(stored), strict=True)
    except ValidationError as error:
        raise BadInput(first_problem(error)) from None
    # A missing setting must not get the default of this version unnoticed, and an unknown one must not get lost.
    if json.loads(json.dumps(asdict(config))) != stored:
        raise BadInput("it has other settings than this version of the program: use the commit that it names")
    return config


def differing_fields(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[object, object]]:
    """The fields in which two configurations differ: name -> (value before, value after)."""
    values_after = _flat(after)
    pairs = {name: (value, values_after[name]) for name, value in _flat(before).items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(config: TrainConfig) -> dict[str, object]:
    """Name -> value of the fields of all sections; no name is in two sections."""
    return {name: value for section in vars(config).values() for name, value in vars(section).items()}
