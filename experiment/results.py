"""The results of eval.py: the planned episodes, the file with their outcomes, and which files may be compared.

The file (docs/RESULTS_JSON.md) is replaced as a whole, so it is valid at any moment. An interrupted evaluation resumes
from this file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from typing_extensions import NotRequired, TypedDict  # pydantic cannot read typing's in Python 3.10

from contracts import BadInput, write_json
from envs.tasks import TaskInfo
from experiment.statistics import Paired, compare, count_successes
from json_fields import read_fields

KIND = {"format": "vla-grpo evaluation", "version": 1}
# Two evaluations are compared only where these settings agree.
EQUAL_IN_COMPARISONS = (
    "temperature",
    "assets",
    "bddl_sha256",
    "init_states_sha256",
    "mode",
    "prompt",
    "init_states",
    "max_env_steps",
    "unnorm_key",
)


class EpisodeKey(NamedTuple):
    """Identifies an episode. Episodes of two evaluations with equal keys are compared as a pair."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int  # how often the initial state was played before; above 0 only with more trials than states


class EpisodeRecord(TypedDict):
    """An episode in the results file: its EpisodeKey, how it was played and how it ended."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int
    seed: int
    mode: str
    success: bool
    env_steps: int  # without the steps in which objects settle at the start
    decisions: int
    seconds: float  # wall time, including the wait for the policy
    error: str | None  # a simulator fault after which the episode was played again
    video: str | None  # path, relative to the results file


class Settings(TypedDict):
    """The settings that, with its key, decide how an episode ends. All episodes of a file have equal settings."""

    checkpoint: str
    weights: str  # fingerprint of the weights, because the pointer `checkpoints/best` moves
    mode: Literal["greedy", "median", "sample", "l1"]  # vla.policy.Mode, whose import takes seconds
    temperature: float | None  # None where the policy does not sample
    seed: int
    assets: str
    bddl_sha256: str | None  # of --bddl-file
    device: str
    frozen_weights: str
    prompt: NotRequired[Literal["leaked"]]  # only with --prompt leaked
    # Only with --init-states fresh: an init_state_id is then the seed of a state.
    init_states: NotRequired[Literal["fresh"]]
    # Older files lack the next three.
    init_states_sha256: NotRequired[str | None]  # of the file of stored states that belongs to --bddl-file
    max_env_steps: NotRequired[int | None]  # of --max-env-steps; None: the suite's step limit
    unnorm_key: NotRequired[str | None]  # of --unnorm-key, which chooses the scale of the actions


@dataclass
class _StoredResults:
    """The fields of a results file that are read again."""

    format: Literal["vla-grpo evaluation"]
    version: Literal[1]
    settings: Settings
    episodes: list[EpisodeRecord]


@dataclass(frozen=True)
class Plan:
    """The episodes to play, in this order, and what the results file stores in addition to results."""

    tasks: Mapping[str, Sequence[TaskInfo]]  # tasks by suite
    keys: Sequence[EpisodeKey]
    header: Mapping[str, object]  # protocol, provenance, training


def make_plan(
    tasks: Mapping[str, Sequence[TaskInfo]],
    trials: int,
    first_init_state: int,
    header: Mapping[str, object],
    samples: bool = False,
    fresh: bool = False,
) -> Plan:
    """Plan `trials` episodes of each task: trial i starts from initial state `first_init_state` + i.

    All episodes of a task are played in a row, so that the simulator builds the task once. `samples`: whether the
    policy samples. Only then is an initial state played more than once; a deterministic policy would repeat the same
    episode, which would count twice. `fresh`: whether initial states are drawn from seeds, which do not end. Raises
    BadInput if a task has no initial state `first_init_state`.
    """
    keys = []
    for suite, suite_tasks in tasks.items():
        for task in suite_tasks:
            num_states = trials if fresh else task.num_init_states - first_init_state
            if num_states <= 0:
                raise BadInput(
                    f"--first-init-state {first_init_state}: {suite} task {task.task_id} "
                    f"has only {task.num_init_states} initial states, counted from 0"
                )
            num_episodes = trials if samples else min(trials, num_states)
            for trial in range(num_episodes):
                init_state_id = first_init_state + trial % num_states
                keys.append(EpisodeKey(suite, task.task_id, init_state_id, repeat=trial // num_states))
    return Plan(tasks, keys, header)


@dataclass(frozen=True)
class Results:
    """The episodes of an evaluation, as its results file stores them."""

    path: Path
    settings: Settings
    episodes: dict[EpisodeKey, EpisodeRecord] = field(default_factory=dict)

    def outcomes(self, suite: str | None = None, task_id: int | None = None) -> dict[EpisodeKey, bool]:
        """Success of each episode: of one task, of one suite, or of all suites (suite None)."""
        return {
            key: record["success"]
            for key, record in self.episodes.items()
            if (suite is None or key.task_suite == suite) and (task_id is None or key.task_id == task_id)
        }


def save_results(results: Results, plan: Plan, before: Results | None = None) -> None:
    """Write the results file, with a comparison if `before`, the results of another policy, is given.

    Raises BadInput if the file cannot be written.
    """
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
) -> dict[str, object]:
    """Success rate and comparisons of the episodes that `Results.outcomes` selects by the last two arguments."""
    outcomes = results.outcomes(suite, task_id)
    summary: dict[str, object] = {"success_n": 0}
    if outcomes:
        summary = dict(count_successes(outcomes.values()).metrics("success"))
    if before is not None:
        pairs = compare(before.outcomes(suite, task_id), outcomes)
        summary |= _comparison("compared", pairs)
    return summary


def _comparison(name: str, pairs: Paired) -> dict[str, object]:
    """A dict with the comparison under `name`; empty if there are no pairs."""
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
    """Read a results file. Raises BadInput if it is missing, damaged, or not a results file of this version."""
    stored = read_fields(path, _StoredResults, "name another results file of eval.py")
    episodes = {EpisodeKey._make(map(record.get, EpisodeKey._fields)): record for record in stored.episodes}
    return Results(path, stored.settings, episodes)


def open_results(path: Path, settings: Settings, plan: Plan, compared_with: Results | None = None) -> Results:
    """Read the results in `path`, so that the evaluation continues, or start new ones if there is no such file.

    `compared_with`: results of the other policy of a comparison, or None. Raises BadInput if the file holds an
    evaluation with different settings or with episodes that are not planned, or if the two cannot be compared.
    """
    if compared_with is not None:
        check_comparable(settings, plan, compared_with)
    if not path.exists():
        return Results(path, settings)
    results = read_results(path)
    differences = [
        f"{name} (file: {results.settings.get(name)}, now: {settings.get(name)})"
        for name in {**settings, **results.settings}
        if results.settings.get(name) != settings.get(name)
    ]
    if differences:
        raise BadInput(
            f"--out {path} holds an evaluation with different settings: {', '.join(differences)}; name another file"
        )
    unplanned = results.episodes.keys() - set(plan.keys)
    if unplanned:
        raise BadInput(
            f"--out {path} holds {len(unplanned)} episodes that are not part of this evaluation; name another file"
        )
    return results


def check_comparable(settings: Settings, plan: Plan, compared_with: Results) -> None:
    """Raise BadInput if `compared_with` differs in more than the policy, or has no episode in common with the plan."""
    for name in EQUAL_IN_COMPARISONS:
        ours = settings.get(name)
        theirs = compared_with.settings.get(name)
        # The L1 head and greedy tokens are both deterministic, so they may be compared, but not with sampling.
        both_deterministic = name == "mode" and "sample" not in (ours, theirs)
        if ours != theirs and not both_deterministic:
            raise BadInput(
                f"--compare-with {compared_with.path} was evaluated with {name} {theirs}, "
                f"this evaluation with {ours}: use the same for both"
            )
    if compared_with.episodes.keys().isdisjoint(plan.keys):
        raise BadInput(
            f"--compare-with {compared_with.path} has no episode in common with this evaluation: "
            "use the same suites, tasks and initial states"
        )
