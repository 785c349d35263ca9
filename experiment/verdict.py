"""Say in one sentence whether a run has improved the policy that it was given."""

from typing import Literal, NamedTuple

from experiment.statistics import Paired
from experiment.stored_run import GREEDY, StoredRun, trained_change

LEVEL = 0.05  # a difference is within chance if its p value is not below this
NEARLY_ALL = 0.95  # from this success rate on there is little left to gain


class Verdict(NamedTuple):
    kind: Literal["better", "worse", "chance", "open"]
    sentence: str


def judge(run: StoredRun) -> Verdict:
    """Compare the last evaluation of the greedy student with the policy that the run was given."""
    change = trained_change(run)
    if change is None:
        return Verdict("open", "Nothing has been evaluated yet")
    before = change.before
    after = change.after
    pairs = change.paired
    if len(run.evaluations) == 1:
        start = f"The policy starts at {100 * before.rate:.0f} % ({before.k} of {before.n} episodes)"
        return Verdict("open", f"{start}: no later evaluation yet")
    rates = f"{100 * before.rate:.0f} % -> {100 * after.rate:.0f} %"
    if not run.is_finished:
        rates += " so far"
    if pairs is None:
        return Verdict("open", f"{rates}: the episodes were not kept, so chance cannot be ruled out")
    p = "p < 0.001" if pairs.p_value < 0.001 else f"p = {pairs.p_value:.2g}"
    basis = f"({p}, {pairs.n} episodes)"
    if pairs.p_value >= LEVEL:
        return Verdict("chance", f"{rates}: within chance {basis}. {_advice(run, pairs)}")
    if pairs.difference > 0:
        return Verdict("better", f"{rates}: better {basis}")
    sentence = f"{rates}: worse {basis}"
    best = run.best_evaluation
    if best != run.evaluations[-1]:
        sentence += f". It was {100 * best[GREEDY]:.0f} % at env step {best['global_step']:,.0f}"
    return Verdict("worse", sentence)


def _advice(run: StoredRun, pairs: Paired) -> str:
    if not run.is_finished:
        return "It is too early to tell"
    if pairs.before.rate >= NEARLY_ALL:
        return "There was little left to gain: choose harder tasks"
    return "Train longer, or evaluate more states: eval.py --init-states fresh"
