"""The table at the end of an evaluation: successes of each task, of each suite and of all."""

from __future__ import annotations

from rl.eval_plan import Plan
from rl.results import Results, compare, count_played


def results_table(results: Results, plan: Plan, before: Results | None = None) -> list[str]:
    """Lines of the table; with `before`, of the episodes that both have, and what has changed."""
    rows: list[tuple[str, ...]] = [
        ("task", "success", "instruction") if before is None else ("task", "before", "after", "difference", "pairs")
    ]
    for suite in plan.suites:
        for task in plan.tasks:
            if task.task_suite == suite:
                label = f"{suite} {task.task_id}"
                rows.append(_row(label, task.instruction, results, before, suite, task.task_id))
        rows.append(_row(f"{suite} all", "", results, before, suite, None))
    if len(plan.suites) > 1:
        rows.append(_row("all suites", "", results, before, None, None))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(
    label: str, instruction: str, results: Results, before: Results | None, suite: str | None, task_id: int | None
) -> tuple[str, ...]:
    episodes = results.of(suite, task_id)
    if before is None:
        return label, str(count_played(episodes)) if episodes else "not played", instruction
    pairs = compare(before, results, suite, task_id)
    if pairs.n == 0:
        return label, "", "", "no pairs", ""
    old = [before.episodes[episode.key] for episode in episodes if episode.key in before.episodes]
    new = [episode for episode in episodes if episode.key in before.episodes]
    outcome = f"{pairs.n}: +{pairs.only_after} -{pairs.only_before}"
    return label, str(count_played(old)), str(count_played(new)), str(pairs), outcome
