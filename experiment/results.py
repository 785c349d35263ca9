"""The results of eval.py: which episodes are planned, the file that holds their outcomes, and who may be compared.

The file (docs/RESULTS_JSON.md) is replaced as a whole after every episode, so it is valid at any moment, and a kill
loses only the episodes that were under way. An interrupted evaluation resumes from this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from contracts import BadInput, read_json, write_json
from envs.perturb import NONE
from envs.tasks import TaskInfo
from experiment.statistics import Paired, compare, count_successes

if TYPE_CHECKING:  # it imports torch, and `--help` is answered without it
    from vla.policy import Mode

KIND = {"format": "vla-grpo evaluation", "version": 1}
# Two evaluations are compared only where these settings agree.
EQUAL_IN_COMPARISONS = ("temperature", "assets", "bddl_sha256", "mode")


class EpisodeKey(NamedTuple):
    """What makes two episodes of two evaluations a pair."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int  # 0, unless there are more trials than initial states
    perturbation: str = NONE  # its label: envs.perturb


class EpisodeRecord(TypedDict):
    """An episode in the file: its EpisodeKey, how it was played, how it ended."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int
    perturbation: str
    seed: int
    mode: str
    success: bool
    env_steps: int  # settling not counted
    decisions: int
    seconds: float  # wall time, waiting for the policy included
    error: str | None  # a simulator fault after which the episode was played again
    video: str | None  # relative to the file


class Settings(TypedDict):
    """What decides, beside its key, how an episode ends. One file holds episodes of equal settings."""

    checkpoint: str
    weights: str  # fingerprint: `checkpoints/best` is a pointer that moves
    mode: Mode
    temperature: float | None  # None where the policy does not sample
    seed: int
    assets: str
    bddl_sha256: str | None
    device: str
    frozen_weights: str


@dataclass(frozen=True)
class Plan:
    """Which episodes are to be played, in this order, and what the file holds beside results."""

    tasks: Mapping[str, Sequence[TaskInfo]]  # by suite
    keys: Sequence[EpisodeKey]
    header: Mapping[str, object]  # protocol, provenance, training

    @property
    def perturbations(self) -> list[str]:
        """Labels, in the order in which they are played."""
        return list(dict.fromkeys(key.perturbation for key in self.keys if key.perturbation != NONE))


def make_plan(
    tasks: Mapping[str, Sequence[TaskInfo]],
    trials: int,
    first_init_state: int,
    header: Mapping[str, object],
    perturbations: Sequence[str] = (),
    samples: bool = False,
) -> Plan:
    """Plan `trials` episodes of each task: trial i starts from initial state `first_init_state` + i.

    All episodes of a task follow one another, while the simulator keeps the task built: first the unperturbed ones,
    then those of each label in `perturbations`. Only a policy that samples (`samples`) plays an initial state more
    than once: a greedy one would repeat itself, and the same episode would count twice. Raises BadInput.
    """
    keys = []
    for suite, suite_tasks in tasks.items():
        for task in suite_tasks:
            num_states = task.num_init_states - first_init_state
            if num_states <= 0:
                raise BadInput(
                    f"--first-init-state {first_init_state}: {suite} task {task.task_id} "
                    f"has only {task.num_init_states} of them"
                )
            num_episodes = trials if samples else min(trials, num_states)
            for label in (NONE, *perturbations):
                for trial in range(num_episodes):
                    init_state_id = first_init_state + trial % num_states
                    repeat = trial // num_states
                    keys.append(EpisodeKey(suite, task.task_id, init_state_id, repeat, label))
    return Plan(tasks, keys, header)


@dataclass(frozen=True)
class Results:
    """The episodes of an evaluation, as they are in its file."""

    path: Path
    settings: Settings
    episodes: dict[EpisodeKey, EpisodeRecord] = field(default_factory=dict)

    def outcomes(
        self, suite: str | None = None, task_id: int | None = None, perturbation: str = NONE
    ) -> dict[EpisodeKey, bool]:
        """Success of each episode with this perturbation: of a task, of a suite, or (suite None) of all.

        The keys are those of the unperturbed episodes, so that perturbed and unperturbed ones can be paired.
        """
        return {
            key._replace(perturbation=NONE): record["success"]
            for key, record in self.episodes.items()
            if (suite is None or key.task_suite == suite)
            and (task_id is None or key.task_id == task_id)
            and key.perturbation == perturbation
        }


def save_results(results: Results, plan: Plan, before: Results | None = None) -> None:
    """Write the file; with `before`, the results of another policy, also the comparison. Raises BadInput."""
    suites = {}
    for suite, tasks in plan.tasks.items():
        task_summaries = {str(task.task_id): _task_summary(results, suite, task, before) for task in tasks}
        suites[suite] = _summary(results, before, suite) | {"tasks": task_summaries}
    document = {
        **KIND,
        "complete": results.episodes.keys() >= set(plan.keys),
        "settings": results.settings,
        "compared_with": None if before is None else {"file": str(before.path), **before.settings},
        "all": _summary(results, before),
        "suites": suites,
        "perturbed": {label: _summary(results, before, perturbation=label) for label in plan.perturbations},
        "episodes": [results.episodes[key] for key in sorted(results.episodes)],
        **plan.header,
    }
    try:
        results.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(results.path, document)
    except OSError as error:
        raise BadInput(f"--out {results.path}: cannot be written ({error.strerror or error})") from None


def _task_summary(results: Results, suite: str, task: TaskInfo, before: Results | None) -> dict[str, object]:
    description = {"name": task.name, "instruction": task.instruction, "max_env_steps": task.max_env_steps}
    return description | _summary(results, before, suite, task.task_id)


def _summary(
    results: Results,
    before: Results | None,
    suite: str | None = None,
    task_id: int | None = None,
    perturbation: str = NONE,
) -> dict[str, object]:
    """Success rate and comparisons of some of the episodes, chosen as `Results.outcomes` does."""
    outcomes = results.outcomes(suite, task_id, perturbation)
    summary: dict[str, object] = {"success_n": 0}
    if outcomes:
        summary = dict(count_successes(outcomes.values()).metrics("success"))
    if before is not None:
        pairs = compare(before.outcomes(suite, task_id, perturbation), outcomes)
        summary |= _comparison("compared", pairs)
    if perturbation != NONE:
        pairs = compare(results.outcomes(suite, task_id), outcomes)
        summary |= _comparison("against_unperturbed", pairs)
    return summary


def _comparison(name: str, pairs: Paired) -> dict[str, object]:
    """The comparison under `name`; nothing when there are no pairs."""
    if pairs.n == 0:
        return {}
    low, high = pairs.interval
    values = {
        "n": pairs.n,
        **asdict(pairs),
        "difference": pairs.difference,
        "low": low,
        "high": high,
        "p_value": pairs.p_value,
    }
    return {name: values}


def read_results(path: Path) -> Results:
    """Read a results file. Raises BadInput."""
    stored = read_json(path)
    if not stored.items() >= KIND.items():
        raise BadInput(f"{path}: no results file of eval.py, version {KIND['version']}; name another")
    try:
        episodes = {}
        for record in stored["episodes"]:
            key = EpisodeKey(*(record[name] for name in EpisodeKey._fields))
            episodes[key] = record
        return Results(path, stored["settings"], episodes)
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path}: damaged: a field is missing or unknown ({error})") from None


def open_results(path: Path, settings: Settings, plan: Plan, other: Results | None = None) -> Results:
    """The results in `path`, to go on with, or new ones if there is no such file.

    `other`: results of the policy that these will be compared with. Raises BadInput when the file holds an
    evaluation with other settings or other episodes, and when `other` cannot be compared.
    """
    if other is not None:
        check_comparable(settings, plan, other)
    if not path.exists():
        return Results(path, settings)
    results = read_results(path)
    stored: Mapping[str, object] = {**results.settings}
    differences = [
        f"{name} (file: {stored.get(name)}, now: {value})"
        for name, value in settings.items()
        if stored.get(name) != value
    ]
    if differences:
        raise BadInput(
            f"--out {path} holds an evaluation with other settings: {', '.join(differences)}; name another file"
        )
    unplanned = results.episodes.keys() - set(plan.keys)
    if unplanned:
        raise BadInput(
            f"--out {path} holds {len(unplanned)} episodes that this evaluation leaves out; name another file"
        )
    return results


def check_comparable(settings: Settings, plan: Plan, other: Results) -> None:
    """Raise BadInput when episodes of this plan and those of `other` differ by more than the policy."""
    ours: Mapping[str, object] = {**settings}
    theirs: Mapping[str, object] = {**other.settings}
    for name in EQUAL_IN_COMPARISONS:
        # The L1 head and greedy tokens are both deterministic: only sampling differs from them.
        both_deterministic = name == "mode" and "sample" not in (ours[name], theirs.get(name))
        if ours[name] != theirs.get(name) and not both_deterministic:
            raise BadInput(
                f"--compare-with {other.path} was evaluated with {name} {theirs.get(name)}, "
                f"this with {ours[name]}"
            )
    if other.episodes.keys().isdisjoint(plan.keys):
        raise BadInput(
            f"--compare-with {other.path} has no episode (task, initial state) in common with this"
        )
