"""Format the results of eval.py as tables for the terminal: by task and suite."""

from collections.abc import Sequence
from itertools import zip_longest

from experiment.results import Plan, Results
from experiment.statistics import compare, count_successes


def results_table(results: Results, plan: Plan) -> list[str]:
    """The lines of a table with the success rate of each task, each suite and all suites."""
    rows = [("task", "success", f"instruction; assets: {results.settings['assets']}")]
    for label, suite, task_id, instruction in _parts(plan):
        outcomes = results.outcomes(suite, task_id)
        rate = str(count_successes(outcomes.values())) if outcomes else "not played"
        rows.append((label, rate, instruction))
    return aligned(rows)


def comparison_table(before: Results, after: Results, plan: Plan) -> list[str]:
    """Success before and after on the episodes that both policies played, with the same lines as `results_table`."""
    rows = [("task", "before", "after", "difference", f"pairs; assets: {after.settings['assets']}")]
    for label, suite, task_id, _ in _parts(plan):
        pairs = compare(before.outcomes(suite, task_id), after.outcomes(suite, task_id))
        if pairs.n == 0:
            rows.append((label, "", "", "no pairs", ""))
        else:
            gained_and_lost = f"{pairs.n}: +{pairs.only_after} -{pairs.only_before}"
            rows.append((label, str(pairs.before), str(pairs.after), str(pairs), gained_and_lost))
    return aligned(rows)


def _parts(plan: Plan) -> list[tuple[str, str | None, int | None, str]]:
    """Label, suite, task id and instruction of each line of a table.

    Suite and task id select the episodes of the line, as in `Results.outcomes`: None stands for all.
    """
    parts: list[tuple[str, str | None, int | None, str]] = []
    for suite, tasks in plan.tasks.items():
        for task in tasks:
            parts.append((f"{suite} {task.task_id}", suite, task.task_id, task.instruction))
        parts.append((f"{suite} all", suite, None, ""))
    if len(plan.tasks) > 1:
        parts.append(("all suites", None, None, ""))
    return parts


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join the cells of each row to a line, padded so that columns align. A row may lack its last cells."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
