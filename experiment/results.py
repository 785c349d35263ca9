"""The file with the episodes of an evaluation (docs/RESULTS_JSON.md), and which evaluations may be compared.

The file is replaced as a whole, so it is valid at any moment. An interrupted evaluation resumes from this file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from configs.sections import ModelConfig, SimulatorConfig
from contracts import BadInput, output_place, read_bytes, read_fields, replaced
from envs.assets import find_pack
from envs.tasks import bddl_task
from experiment.episodes import EpisodeKey, EpisodeResult, Rule
from experiment.policies import weights_fingerprint
from experiment.provenance import simulator_packages
from vla.policy import Policy

SAVE_INTERVAL_S = 10.0  # writing the file takes 0.2 s with 10,000 episodes in it
# What two evaluations that are compared may differ in: the policy, and where it runs.
FREE_IN_COMPARISONS = (
    "checkpoint",
    "weights",
    "unnorm_key",
    "num_images",
    "seed",
    "device",
    "frozen_weights",
)


@dataclass(frozen=True)
class Settings:
    """What decides how an episode ends, with its key and rule. All episodes of a file have equal settings."""

    checkpoint: str
    weights: str  # fingerprint of the weights, because the pointer `checkpoints/best` moves
    seed: int
    assets: str
    simulator: str  # its packages with their versions
    bddl_sha256: str | None  # of --bddl-file
    init_states_sha256: str | None  # of the file of stored states that belongs to --bddl-file
    device: str
    frozen_weights: str
    max_env_steps: int | None  # of --max-env-steps; None: the suite's step limit
    unnorm_key: str | None  # of --unnorm-key or the adapter; it chooses the scale of the actions
    prompt: Literal["clean", "leaked"] = "clean"
    num_images: int | None = None  # that the policy reads; None: unknown, in files of earlier programs


@dataclass
class Results:
    """The content of a results file."""

    settings: Settings
    provenance: dict[str, object]  # command, commit, versions, machine
    episodes: list[EpisodeResult] = field(default_factory=list)
    format: Literal["vla-grpo evaluation"] = "vla-grpo evaluation"
    version: Literal[3] = 3

    @property
    def rules(self) -> list[Rule]:
        """By which rules the episodes were played."""
        return list(dict.fromkeys(result.rule for result in self.episodes))

    def outcomes(self, rule: Rule) -> dict[EpisodeKey, bool]:
        """Success of each episode that was played by this rule."""
        return {result.key: result.success for result in self.episodes if result.rule == rule}


FILE_TYPE = TypeAdapter(Results)


def settings_of(
    model: ModelConfig,
    simulator: SimulatorConfig,
    policy: Policy,
    seed: int,
    prompt: Literal["clean", "leaked"] = "clean",
) -> Settings:
    """The settings of an evaluation. Raises BadInput if a file that they name cannot be read."""
    bddl_file = simulator.bddl_file
    return Settings(
        checkpoint=str(model.checkpoint),
        weights=weights_fingerprint(policy),
        seed=seed,
        assets=str(find_pack(simulator.assets)),
        simulator=simulator_packages(),
        bddl_sha256=_sha256(bddl_file),
        init_states_sha256=None if bddl_file is None else _sha256(bddl_task(bddl_file).init_states),
        device=policy.device.type,
        frozen_weights=policy.frozen_weights,
        max_env_steps=simulator.max_env_steps,
        unnorm_key=policy.fixed_unnorm_key,
        prompt=prompt,
        num_images=policy.num_images,
    )


def _sha256(path: str | Path | None) -> str | None:
    return None if path is None else hashlib.sha256(read_bytes(Path(path))).hexdigest()


def read_results(path: Path) -> Results:
    """Read a results file. Raises BadInput if it is missing, damaged, or not a results file of this version."""
    return read_fields(path, Results, "name another results file of eval.py")


def write_results(path: Path, results: Results) -> None:
    """Write a results file, its episodes in order. Raises OSError."""
    episodes = sorted(results.episodes, key=lambda result: (result.actor, result.mode, result.key))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as draft:
        draft.write_bytes(FILE_TYPE.dump_json(replace(results, episodes=episodes), indent=1))


@dataclass
class ResultsFile:
    """The results of an evaluation that goes on, and the file that they are saved to."""

    path: Path
    results: Results
    saved_at: float = 0.0  # so that the first episode is saved at once

    def add(self, result: EpisodeResult) -> None:
        """Add an episode, and save the file if that was not done lately."""
        self.results.episodes.append(result)
        if time.monotonic() > self.saved_at + SAVE_INTERVAL_S:
            self.save()
            self.saved_at = time.monotonic()

    def save(self) -> None:
        """Write the file. Raises BadInput if it cannot be written."""
        with output_place(self.path.parent):
            write_results(self.path, self.results)


def open_results(path: Path, settings: Settings, provenance: dict[str, object]) -> ResultsFile:
    """Open the results in `path`, so that the evaluation continues, or new ones if there is no such file.

    Raises BadInput if the file holds an evaluation with different settings.
    """
    if not path.exists():
        return ResultsFile(path, Results(settings, provenance))
    results = read_results(path)
    refuse_differences(f"--out {path}", results.settings, settings)
    return ResultsFile(path, results)


def refuse_differences(name: str, stored: Settings, now: Settings, free: Sequence[str] = ()) -> None:
    """Raise BadInput unless an evaluation has the settings of the stored one `name`, apart from those in `free`."""
    if stored.num_images is None:  # unknown
        free = (*free, "num_images")
    differences = [
        f"{setting} is {value} there, and {getattr(now, setting)} here"
        for setting, value in vars(stored).items()
        if setting not in free and value != getattr(now, setting)
    ]
    if differences:
        raise BadInput(f"{name} was played otherwise: {'; '.join(differences)}; name another file")
