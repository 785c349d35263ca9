"""Say in one sentence whether a run has improved the policy that it was given, sampled and greedy."""

from typing import Literal, NamedTuple

from experiment.stored_run import Change, StoredRun, trained_changes

LEVEL = 0.05  # a difference is within chance if its p value is not below this
NEARLY_ALL = 0.95  # from this success rate on there is little left to gain

Kind = Literal["better", "worse", "chance", "open"]


class Verdict(NamedTuple):
    kind: Kind
    sentence: str


def judge(run: StoredRun) -> Verdict:
    """Compare the student of the last evaluation with the policy that the run was given, by each of its rates."""
    changes = trained_changes(run)
    if not changes:
        return Verdict("open", "Nothing has been evaluated yet")
    if len(run.evaluations) == 1:
        starts = ", ".join(f"{change.label} {change.before}" for change in changes)
        return Verdict("open", f"The policy starts at {starts}: no later evaluation yet")
    kinds = [_kind(change) for change in changes]
    so_far = "" if run.is_finished else " so far"
    sentence = "; ".join(
        _sentence(change, kind) + so_far for change, kind in zip(changes, kinds, strict=True)
    )
    kind = _worst(kinds)
    if kind == "chance" and run.is_finished:
        sentence += f". {_advice(changes)}"
    if kind == "worse":
        sentence += f". The best checkpoint is that of env step {run.best_evaluation['global_step']:,.0f}"
    return Verdict(kind, sentence)


def _kind(change: Change) -> Kind:
    pairs = change.paired
    if pairs is None:
        return "open"
    if pairs.p_value >= LEVEL:
        return "chance"
    return "better" if pairs.difference > 0 else "worse"


def _worst(kinds: list[Kind]) -> Kind:
    """The kind of the whole run: better if a rate is better and none is worse."""
    order: tuple[Kind, ...] = ("worse", "better", "chance", "open")
    return next(kind for kind in order if kind in kinds)


def _sentence(change: Change, kind: Kind) -> str:
    rates = f"{change.label} {change.before} -> {change.after}"
    if change.paired is None:
        return f"{rates}: the episodes were not kept, so chance cannot be ruled out"
    p = change.paired.p_value
    shown = "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
    return f"{rates}: {'within chance' if kind == 'chance' else kind} ({shown})"


def _advice(changes: list[Change]) -> str:
    if all(change.before.rate >= NEARLY_ALL for change in changes):
        return "There was little left to gain: choose harder tasks"
    return "Train longer, or evaluate more states: eval.py --init-states both --trials 200"
