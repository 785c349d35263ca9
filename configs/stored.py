"""Convert a configuration to the form in config.json, and back, also from files of older versions."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from configs.config import TrainConfig
from contracts import BadInput
from json_fields import first_problem

Sections: TypeAlias = dict[str, dict[str, Any]]  # settings by section, as JSON holds them


def to_dict(config: TrainConfig) -> Sections:
    """The settings by section, as config.json stores them."""
    return asdict(config)


def from_dict(stored: Any, source: str) -> TrainConfig:
    """The inverse of `to_dict`, applied to what was read from JSON. `source` names the file in messages.

    Raises BadInput if a setting is missing, unknown or not allowed.
    """
    try:
        sections = _without_withdrawn(stored)
        config = TypeAdapter(TrainConfig).validate_json(json.dumps(sections), strict=True)
    except ValidationError as error:
        raise BadInput(f"{source}: {first_problem(error)}") from None
    except BadInput as problem:
        raise BadInput(f"{source}: {problem}") from None
    # A missing setting must not get the default of this version unnoticed, and an unknown one must not get lost.
    for name in sorted(_names(to_dict(config)) ^ _names(sections)):
        raise BadInput(f"{source}: {name} is missing, or is not a setting of this version of the program")
    return config


def _names(sections: Sections) -> set[str]:
    """SECTION.NAME of every setting."""
    return {f"{section}.{name}" for section, settings in sections.items() for name in settings}


def _without_withdrawn(stored: Any) -> Any:
    """Drop withdrawn settings (those that this version no longer has) if they ask for what this version does.

    Raises BadInput if one asks for something else.
    """
    if not isinstance(stored, dict) or not all(isinstance(settings, dict) for settings in stored.values()):
        return stored  # this is not a configuration, and the caller refuses it
    sections = copy.deepcopy(stored)
    for (section, name), accepted in _accepted_values(stored).items():
        settings = sections.get(section, {})
        if name not in settings:
            continue
        value = settings.pop(name)
        if value not in accepted:
            advice = (
                "continuing with another algorithm would spoil the run: use the commit that config.json names"
            )
            if name == "wandb_project":
                advice = f"set the environment variable WANDB_PROJECT={value}"
            raise BadInput(f"{section}.{name} is {value!r}, and this version has no such setting; {advice}")
    return sections


def _accepted_values(stored: Sections) -> dict[tuple[str, str], list[object]]:
    """(section, name) of each withdrawn setting -> values with which an older version did what this version does."""
    update = stored.get("update", {})
    rollout = stored.get("rollout", {})
    extra_steps = [rollout.get("n_steps")]
    if not rollout.get("dynamic_sampling"):  # there were no extra steps, whatever their limit
        extra_steps.append(rollout.get("max_extra_steps"))
    return {
        ("phases", "distill_target"): ["greedy"],
        ("phases", "distill_temperature"): [0.5],
        ("phases", "importance"): ["student"],
        ("rollout", "max_extra_steps"): extra_steps,
        ("loss", "dual_clip"): [3.0],
        ("update", "lora_alpha"): [update.get("lora_rank")],
        ("run", "wandb_project"): ["vla-grpo", os.environ.get("WANDB_PROJECT")],
    }
