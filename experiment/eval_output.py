"""What eval.py prints at its end: the tables of success rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from configs.eval_config import EvalConfig
from experiment.results import Plan, Results
from experiment.results_table import comparison_table, results_table
from experiment.terminal import say

if TYPE_CHECKING:  # these take seconds to import, and neither --help nor messages about flags need them
    from experiment.stored_run import Training


def print_results(config: EvalConfig, results: Results, plan: Plan, before: Results | None) -> None:
    """Print the tables of success rates."""
    say("\n".join(results_table(results, plan)))
    if config.init_states == "benchmark":
        print_trained_states(config, plan)
    if before is not None:
        print(f"\nbefore: {before.settings['checkpoint']} ({before.settings['mode']}), {before.path}")
        print(*comparison_table(before, results, plan), sep="\n")
    print(f"results: {results.path}")


def print_trained_states(config: EvalConfig, plan: Plan) -> None:
    """Print how many episodes are not held out, because the checkpoint's run trained on their initial states."""
    from experiment.stored_run import was_trained_on

    training = cast("Training | None", plan.header["training"])
    if training is None:
        return
    bddl_file = config.simulator.bddl_file
    num_trained = sum(
        was_trained_on(training, key.task_suite, key.task_id, key.init_state_id, bddl_file)
        for key in plan.keys
    )
    if num_trained > 0:
        say(
            f"{num_trained} of {len(plan.keys)} episodes start from initial states that {config.model.checkpoint} was "
            "trained on: for held-out success leave them out with --first-init-state and --trials"
        )
