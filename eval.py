#!/usr/bin/env python
"""Measure the success rate of a checkpoint on LIBERO tasks.

    python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --out results.json
    python eval.py --checkpoint runs/RUN/checkpoints/best --compare-with CHECKPOINT --task-ids 0
    python eval.py --checkpoint CHECKPOINT --task-ids 0 --mode greedy sample --init-states both --trials 200
    python eval.py --checkpoint CHECKPOINT --protocol libero --task-suite all --out results.json

Episode i of a task starts from the benchmark's initial state i. Policies act greedily unless --mode or --temperature is
given. A command with --out continues an interrupted evaluation. The results file is described in docs/RESULTS_JSON.md.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from command_line import main_guard
from configs.cli import parse_eval
from envs.cache import choose_library_caches


def before_imports(argv: Sequence[str]) -> None:
    """Answer --help and wrong flags before the imports below, which take seconds."""
    parse_eval(argv)
    choose_library_caches()


if __name__ == "__main__":
    exit_code = main_guard("eval.py", before_imports)
    if exit_code != 0:
        sys.exit(exit_code)

from configs.eval_config import EvalConfig
from envs.assets import find_pack
from envs.tasks import bddl_task
from experiment.checkpoint_evaluation import Plan, make_plan, play_planned, settle
from experiment.policies import find_checkpoint
from experiment.results import Results
from experiment.results_table import comparison_table, entropy_line, parts_of, results_table
from experiment.run_folder import read_trained_on
from experiment.terminal import say
from preflight import looks_warning


def main(argv: Sequence[str]) -> None:
    """Play the missing episodes of one checkpoint, or of the two of a comparison, and print the results."""
    config = parse_eval(argv)
    config, plan, results, before = play(config, argv)
    print_results(config, plan, results, before)


def evaluate(config: EvalConfig) -> Results:
    """Evaluate from Python as the command does, without its tables. Raises BadInput."""
    _, _, results, _ = play(config, argv=[])  # the calling script's flags are not those of an evaluation
    return results


def play(config: EvalConfig, argv: Sequence[str]) -> tuple[EvalConfig, Plan, Results, Results | None]:
    """Play what is missing. Returns the settings without `auto`, the plan, the results and those of --compare-with."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    config = settle(config)
    plan = make_plan(config, argv)
    print_looks(config)
    results, before = play_planned(config, plan)
    return config, plan, results, before


def print_looks(config: EvalConfig) -> None:
    """Print the assets and the origin of initial states, with warnings about looks that the policy does not know."""
    pack = find_pack(config.simulator.assets)
    say(f"assets: {pack}")
    warning = looks_warning(find_checkpoint(config.model), pack)
    if warning is not None:
        say(warning)
    if config.protocol is not None and pack.looks != "official":
        say(
            "published results use LIBERO's own looks; for results that compare with them use --assets official"
        )
    if config.simulator.bddl_file is not None:
        say(f"initial states: {bddl_task(config.simulator.bddl_file).init_states_source}")


def print_results(config: EvalConfig, plan: Plan, results: Results, before: Results | None) -> None:
    """Print the tables of success rates."""
    parts = parts_of(plan.tasks, plan.keys)
    rules = [rule for rule in results.rules if config.mode is None or rule.mode in config.mode]
    say("\n".join(results_table(results, rules, parts)))
    entropy = entropy_line(results)
    if entropy is not None:
        say(entropy)
    print_trained_states(config, plan)
    if before is not None:
        print(f"\nbefore: {before.settings.checkpoint}")
        print(*comparison_table(before, results, rules, parts), sep="\n")


def print_trained_states(config: EvalConfig, plan: Plan) -> None:
    """Print how many episodes are not held out, because the checkpoint's run trained on their initial states."""
    trained_on = read_trained_on(Path(str(config.model.checkpoint)))
    if trained_on is None:
        return
    bddl_file = config.simulator.bddl_file
    num_trained = sum(
        trained_on.contains(key.task_suite, key.task_id, key.init_state_id, bddl_file)
        for key in plan.keys
        if not key.fresh
    )
    if num_trained > 0:
        say(
            f"{num_trained} of {len(plan.keys)} episodes start from initial states that {config.model.checkpoint} was "
            "trained on: for held-out success leave them out with --first-init-state and --trials"
        )


if __name__ == "__main__":
    sys.exit(main_guard("eval.py", main))
