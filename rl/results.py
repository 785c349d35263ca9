"""The results file of an evaluation (docs/RESULTS_JSON.md): every episode, written as soon as it has ended.

The file is replaced as a whole after every episode, so at any moment it is valid, and a kill loses the episodes that
were under way. It is its own journal: an evaluation that goes on reads which episodes it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from configs.field_types import check_types
from errors import BadInput
from rl.eval_plan import Key, Plan
from rl.evaluation import Successes
from rl.paired import Paired, count_pairs
from rl.run import write_json
from untrusted.json_file import read_json

FORMAT, VERSION = "vla-grpo evaluation", 1


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode and how it ended."""

    task_suite: str
    task_id: int
    init_state_id: int
    repeat: int
    seed: int
    mode: str  # how the policy decided: "greedy", "sample" or "l1"
    success: bool
    env_steps: int
    decisions: int
    seconds: float  # wall time, waiting for other episodes of the batch included
    error: str | None  # a simulator fault after which the episode was played again; null nearly always
    video: str | None  # relative to the results file

    @property
    def key(self) -> Key:
        return Key(self.task_suite, self.task_id, self.init_state_id, self.repeat)


@dataclass(frozen=True)
class Settings:
    """Everything beside the episode that decides how it ends: one file holds episodes of equal settings."""

    checkpoint: str
    weights: str  # fingerprint: `best` is a pointer that moves
    mode: str
    temperature: float | None  # of sampling
    seed: int
    assets: str
    bddl_sha256: str | None
    device: str
    dtype: str


class Results:
    """The episodes of an evaluation, in memory and in its file."""

    def __init__(self, path: Path, settings: Settings, episodes: Iterable[PlayedEpisode] = ()):
        self.path = path
        self.settings = settings
        self.episodes = {episode.key: episode for episode in episodes}

    def of(self, task_suite: str | None = None, task_id: int | None = None) -> list[PlayedEpisode]:
        """The episodes of a suite, of a task, or all."""
        return [
            episode
            for episode in self.episodes.values()
            if task_suite in (None, episode.task_suite) and task_id in (None, episode.task_id)
        ]

    def add(self, episode: PlayedEpisode) -> None:
        self.episodes[episode.key] = episode


def count_played(episodes: Sequence[PlayedEpisode]) -> Successes:
    return Successes(sum(episode.success for episode in episodes), len(episodes))


def compare(before: Results, after: Results, task_suite: str | None = None, task_id: int | None = None) -> Paired:
    """Pair the episodes that both have, of a suite, of a task, or all."""
    return count_pairs(
        (before.episodes[episode.key].success, episode.success)
        for episode in after.of(task_suite, task_id)
        if episode.key in before.episodes
    )


def check_comparable(before: Results, settings: Settings, plan: Plan) -> None:
    """Raise BadInput unless a difference from an earlier evaluation can only come from the policies."""
    for name in ("temperature", "assets", "bddl_sha256"):
        old, new = getattr(before.settings, name), getattr(settings, name)
        if old != new:
            raise BadInput(f"--compare-with {before.path}: it was evaluated with {name} {old}, this with {new}")
    modes = before.settings.mode, settings.mode
    if modes[0] != modes[1] and "sample" in modes:
        raise BadInput(f"--compare-with {before.path}: it was evaluated with --mode {modes[0]}, this with {modes[1]}")
    if before.episodes.keys().isdisjoint(plan.keys):
        raise BadInput(f"--compare-with {before.path}: it has no episode (task, initial state) in common with this")


def save_results(results: Results, plan: Plan, before: Results | None = None) -> None:
    """Write the file; with `before`, also the comparison."""
    try:
        results.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(results.path, document(results, plan, before))
    except OSError as error:
        raise BadInput(f"--out {results.path}: cannot be written ({error.strerror or error})") from None


def document(results: Results, plan: Plan, before: Results | None) -> dict[str, Any]:
    """The content of the file, as docs/RESULTS_JSON.md describes it."""

    def outcome(*part: Any) -> dict[str, Any]:
        played = count_played(results.of(*part)).metrics("success") if results.of(*part) else {"success_n": 0}
        pairs = compare(before, results, *part) if before is not None else None
        return {**played, **({"compared": pairs.record()} if pairs is not None and pairs.n else {})}

    suites: dict[str, Any] = {suite: {**outcome(suite), "tasks": {}} for suite in plan.suites}
    for task in plan.tasks:
        suites[task.task_suite]["tasks"][str(task.task_id)] = {
            "name": task.name,
            "instruction": task.instruction,
            "max_env_steps": task.max_env_steps,
            **outcome(task.task_suite, task.task_id),
        }
    return {
        "format": FORMAT,
        "version": VERSION,
        "complete": results.episodes.keys() >= set(plan.keys),
        "settings": asdict(results.settings),
        "compared_with": None if before is None else {"file": str(before.path), **asdict(before.settings)},
        "all": outcome(),
        "suites": suites,
        "episodes": [asdict(episode) for episode in sorted(results.episodes.values(), key=lambda e: e.key)],
        **plan.head,
    }


def read_results(path: Path, flag: str) -> Results:
    """Read a results file. Raises BadInput, naming the flag that named it."""
    try:
        stored = read_json(path)
    except BadInput as problem:
        raise BadInput(f"{flag} {problem}") from None
    if stored.get("format") != FORMAT:
        raise BadInput(f"{flag} {path}: no results file of eval.py (its `format` is not {FORMAT!r}); name another")
    if stored.get("version") != VERSION:
        raise BadInput(f"{flag} {path}: version {stored.get('version')!r}, this program reads {VERSION}")
    try:
        settings = _record(Settings, stored["settings"])
        return Results(path, settings, [_record(PlayedEpisode, episode) for episode in stored["episodes"]])
    except (KeyError, TypeError) as error:
        raise BadInput(f"{flag} {path}: damaged: a field is missing, unknown or of another type ({error})") from None


def open_results(path: Path, settings: Settings, plan: Plan) -> Results:
    """The results in `path`, to go on with, or new ones. Raises BadInput where the file is of another evaluation."""
    if not path.exists():
        return Results(path, settings)
    results = read_results(path, "--out")
    stored, wanted = asdict(results.settings), asdict(settings)
    other = [f"{name} (file: {stored[name]}, now: {wanted[name]})" for name in stored if stored[name] != wanted[name]]
    if other:
        raise BadInput(f"--out {path} holds an evaluation with other settings: {', '.join(other)}; name another file")
    strange = len(results.episodes.keys() - set(plan.keys))
    if strange:
        raise BadInput(
            f"--out {path} holds {strange} episodes of tasks or initial states that this evaluation leaves out; name "
            "another file"
        )
    return results


def _record(kind: type, stored: Any) -> Any:
    """An instance of a flat dataclass from a JSON object with exactly its fields. Raises TypeError."""
    known = {field.name for field in fields(kind)}
    if not isinstance(stored, dict) or set(stored) != known:
        raise TypeError(f"{kind.__name__}: {sorted(set(stored) ^ known) if isinstance(stored, dict) else stored!r}")
    check_types(kind, stored)
    return kind(**stored)
