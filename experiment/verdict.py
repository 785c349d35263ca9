"""What the evaluations of a run say: success before and after training, and whether the policy has become better."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from experiment.evaluator import EpisodeKey, EpisodeResult, Role
from experiment.results import evaluation_path, group_by_role, read_results
from experiment.statistics import Paired, Successes, compare, count_successes
from experiment.stored_run import StoredRun

LEVEL = 0.05  # a difference is within chance if its p value is not below this
NEARLY_ALL = 0.95  # from this success rate on there is little left to gain
# From this success rate on absolute advantages, which have no baseline, have several times the gradient noise of batch.
NEEDS_BASELINE = 0.7

Kind = Literal["better", "worse", "chance", "open"]


@dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation in a run."""

    env_steps: int
    episodes: Mapping[Role, Sequence[EpisodeResult]]

    @property
    def rates(self) -> dict[Role, Successes]:
        return {role: count_successes(r.success for r in played) for role, played in self.episodes.items()}

    def outcomes(self, role: Role, task_id: int | None = None) -> dict[EpisodeKey, bool]:
        """Success of each episode that was played in this role, of one task or of all."""
        return {
            result.key: result.success
            for result in self.episodes.get(role, ())
            if task_id in (None, result.task_id)
        }


class Change(NamedTuple):
    """Success in the first and in the last evaluation, on the same episodes."""

    label: str
    paired: Paired

    def __str__(self) -> str:
        return f"{self.label}: {self.paired.before} before, {self.paired.after} after; {self.paired}"


class Verdict(NamedTuple):
    kind: Kind
    sentence: str


def read_evaluations(run: StoredRun) -> list[Evaluation]:
    """The evaluations of a run whose file is there, oldest first. Raises BadInput if a file is damaged."""
    evaluations = []
    for env_steps in run.evaluated_steps:
        path = evaluation_path(run.folder, env_steps)
        if path.exists():
            evaluations.append(Evaluation(env_steps, group_by_role(read_results(path).episodes)))
    return evaluations


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation that chose checkpoints/best: with the highest greedy success; the first one of equals."""
    return max(evaluations, key=lambda evaluation: evaluation.rates["student"].rate)


def changes(run: StoredRun, evaluations: Sequence[Evaluation]) -> list[Change]:
    """The changes from the policy that the run was given, sampled and greedy; with several tasks also of each task.

    The greedy student is compared with its teacher, the policy before training, unless --teacher names another one.
    Empty without two evaluations.
    """
    if len(evaluations) < 2:
        return []
    given: Role = "teacher" if run.config.phases.teacher_checkpoint is None else "student"
    first = evaluations[0]
    last = evaluations[-1]
    roles: list[tuple[str, Role, Role]] = [("greedy", given, "student")]
    if "student_sampled" in first.episodes:  # unless --eval-trials is 0
        roles.insert(0, ("sampled", "student_sampled", "student_sampled"))
    task_ids = sorted({result.task_id for result in first.episodes["student"]})
    found = []
    for task_id in (None, *task_ids) if len(task_ids) > 1 else (None,):
        for name, before, after in roles:
            label = name if task_id is None else f"task {task_id}, {name}"
            paired = compare(first.outcomes(before, task_id), last.outcomes(after, task_id))
            if paired.n > 0:
                found.append(Change(label, paired))
    return found


def judge(run: StoredRun, evaluations: Sequence[Evaluation]) -> Verdict:
    """Compare the student of the last evaluation with the policy that the run was given, by each of its rates."""
    if not evaluations:
        return Verdict("open", "Nothing has been evaluated yet")
    if len(evaluations) == 1:
        rates = evaluations[0].rates
        starts = ", ".join(f"{role.replace('_', ' ')} {successes}" for role, successes in rates.items())
        return Verdict("open", f"The policy starts at: {starts}. No later evaluation yet")
    by_rate = [change for change in changes(run, evaluations) if not change.label.startswith("task")]
    kinds = [_kind(change.paired) for change in by_rate]
    so_far = "" if run.is_finished else " so far"
    sentence = "; ".join(_sentence(change) + so_far for change in by_rate)
    kind: Kind = "chance"
    if "worse" in kinds:
        kind = "worse"
    elif "better" in kinds:
        kind = "better"
    if kind == "chance" and run.is_finished:
        sentence += f". {_advice(by_rate)}"
    if kind == "worse":
        sentence += f". The best evaluation is that of env step {best_evaluation(evaluations).env_steps:,}"
    highest_rate = max(change.paired.after.rate for change in by_rate)
    if run.config.loss.advantage == "absolute" and highest_rate > NEEDS_BASELINE:
        sentence += (
            f". Above {100 * NEEDS_BASELINE:.0f} % success --advantage batch has a fraction of the gradient noise of "
            "absolute"
        )
    return Verdict(kind, sentence)


def _kind(pairs: Paired) -> Kind:
    if pairs.p_value >= LEVEL:
        return "chance"
    return "better" if pairs.difference > 0 else "worse"


def _sentence(change: Change) -> str:
    pairs = change.paired
    kind = _kind(pairs)
    p = "p < 0.001" if pairs.p_value < 0.001 else f"p = {pairs.p_value:.2g}"
    comparison = "within chance" if kind == "chance" else kind
    return f"{change.label} {pairs.before} -> {pairs.after}: {comparison} ({p})"


def _advice(by_rate: Sequence[Change]) -> str:
    if all(change.paired.before.rate >= NEARLY_ALL for change in by_rate):
        return "There was little left to gain: choose harder tasks"
    return "Train longer, or evaluate more states: eval.py --init-states both --trials 200"
