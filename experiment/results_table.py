"""The results of eval.py as tables for the terminal: a row for each task, suite and rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import mean

from envs.env import TaskInfo
from experiment.episodes import EpisodeKey, Rule
from experiment.results import Results
from experiment.statistics import compare, count_successes


@dataclass(frozen=True)
class Part:
    """The episodes of some rows of a table; None stands for all."""

    label: str
    suite: str | None = None
    task_id: int | None = None
    fresh: bool | None = None
    instruction: str = ""

    def of(self, outcomes: Mapping[EpisodeKey, bool]) -> dict[EpisodeKey, bool]:
        """The outcomes of this part."""
        return {key: success for key, success in outcomes.items() if self.contains(key)}

    def contains(self, key: EpisodeKey) -> bool:
        return (
            self.suite in (None, key.task_suite)
            and self.task_id in (None, key.task_id)
            and self.fresh in (None, key.fresh)
        )


def parts_of(tasks: Mapping[str, Sequence[TaskInfo]], keys: Sequence[EpisodeKey]) -> list[Part]:
    """Every task, every suite, and all suites; official and fresh initial states apart if there are both."""
    parts = []
    for suite, suite_tasks in tasks.items():
        for task in suite_tasks:
            parts.append(Part(f"{suite} {task.task_id}", suite, task.task_id, instruction=task.instruction))
        parts.append(Part(f"{suite} all", suite))
    if len(tasks) > 1:
        parts.append(Part("all suites"))
    if len({key.fresh for key in keys}) > 1:
        parts += [Part("official states", fresh=False), Part("fresh states", fresh=True)]
    return parts


def results_table(results: Results, rules: Sequence[Rule], parts: Sequence[Part]) -> list[str]:
    """The lines of a table with the success rate of each part by each rule."""
    rows = [("task", "rule", "success", f"instruction; assets: {results.settings.assets}")]
    for part in parts:
        for rule in rules:
            outcomes = part.of(results.outcomes(rule))
            rate = str(count_successes(outcomes.values())) if outcomes else "not played"
            rows.append((part.label, str(rule), rate, part.instruction))
    return aligned(rows)


def comparison_table(
    before: Results, after: Results, rules: Sequence[Rule], parts: Sequence[Part]
) -> list[str]:
    """Success before and after on the episodes that both policies played.

    A rule is compared with the same one before, or, where there was another one alone, with that one.
    """
    rows = [("task", "rule", "before", "after", "difference", f"pairs; assets: {after.settings.assets}")]
    for part in parts:
        for rule in rules:
            rules_before = before.rules
            rule_before = rules_before[0] if len(rules_before) == 1 else rule
            name = str(rule) if rule == rule_before else f"{rule_before} -> {rule}"
            pairs = compare(part.of(before.outcomes(rule_before)), part.of(after.outcomes(rule)))
            if pairs.n == 0:
                rows.append((part.label, name, "", "", "no pairs", ""))
            else:
                gained_and_lost = f"{pairs.n}: +{pairs.only_after} -{pairs.only_before}"
                rows.append(
                    (part.label, name, str(pairs.before), str(pairs.after), str(pairs), gained_and_lost)
                )
    return aligned(rows)


def entropy_line(results: Results) -> str | None:
    """The mean entropy of the policy in its sampled episodes; None if there are none."""
    entropies = [result.entropy for result in results.episodes if result.entropy is not None]
    return f"entropy: {mean(entropies):.2f} nats a token" if entropies else None


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join the cells of each row to a line, padded so that columns align. A row may lack its last cells."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
