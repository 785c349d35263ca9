"""Success by category of LIBERO-Plus, from one or more results files of eval.py.

python -m benchmarks.plus_scores spatial.json object.json goal.json ten.json
Categories pool the suites, as in the published table. A category that was not played whole says so, and there is no
total: published totals hold 3,743 variants that are not played here (docs/PUBLISHED_ROBUSTNESS.md).
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from command_line import main_guard
from envs.libero_plus import find_variants, suite_variants
from envs.tasks import PLUS_CHANGES, PUBLISHED_SUITES, split_suite
from experiment.results import read_results
from experiment.results_table import aligned
from experiment.statistics import count_successes


def read_outcomes(paths: Sequence[Path]) -> dict[str, dict[str, bool]]:
    """Success by category and variant. The later of two files counts if both have a variant."""
    outcomes: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in paths:
        results = read_results(path)
        print(f"{path}: {results.settings['checkpoint']}, prompt {results.settings.get('prompt', 'clean')}")
        for key, record in results.episodes.items():
            _, change = split_suite(key.task_suite)
            if change in PLUS_CHANGES:
                variant = find_variants(key.task_suite, key.task_id)[key.init_state_id]
                outcomes[variant.category][f"{variant.suite} {variant.name}"] = record["success"]
    return outcomes


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.plus_scores", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="results files of eval.py")
    outcomes = read_outcomes(parser.parse_args(argv).results)
    all_variants = [variant for suite in PUBLISHED_SUITES for variant in suite_variants(suite)]
    rows = [("category", "success", "variants")]
    for category in PLUS_CHANGES[:-1]:
        num_variants = sum(variant.category == category for variant in all_variants)
        played = outcomes[category]
        if played:
            rows.append((category, str(count_successes(played.values())), f"{len(played)} of {num_variants}"))
    print(*aligned(rows), sep="\n")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.plus_scores", main))
