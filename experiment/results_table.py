"""The results of eval.py as tables for the terminal: a row for each task, suite and rule."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import mean

from experiment.episodes import EpisodeKey, Rule
from experiment.results import Results
from experiment.statistics import compare, count_successes


def results_table(results: Results, rules: Sequence[Rule], plan: Mapping[EpisodeKey, str]) -> list[str]:
    """Success rates, and the entropy where it was measured. plan: the instruction of each episode."""
    table = [("task", "rule", "success", f"instruction; assets: {results.settings.assets}")]
    for label, keys in parts_of(list(plan)).items():
        for rule in rules:
            outcomes = only(keys, results.outcomes(rule))
            rate = str(count_successes(outcomes.values())) if outcomes else "not played"
            instructions = {plan[key] for key in keys}
            table.append((label, str(rule), rate, instructions.pop() if len(instructions) == 1 else ""))
    lines = aligned(table)
    for rule in rules:
        played = [result for result in results.episodes if result.rule == rule and result.key in plan]
        entropies = [result.entropy for result in played if result.entropy is not None]
        if entropies:
            lines.append(f"entropy, {rule}: {mean(entropies):.2f} nats a token")
    return lines


def comparison_table(
    before: Results, after: Results, rules: Sequence[Rule], plan: Mapping[EpisodeKey, str]
) -> list[str]:
    """Success before and after on the episodes that both policies played.

    A rule is compared with the same one before, or, where there was another one alone, with that one.
    """
    table = [("task", "rule", "before", "after", "difference", f"pairs; assets: {after.settings.assets}")]
    rules_before = before.rules
    for label, keys in parts_of(list(plan)).items():
        for rule in rules:
            rule_before = rules_before[0] if len(rules_before) == 1 else rule
            name = str(rule) if rule == rule_before else f"{rule_before} -> {rule}"
            pairs = compare(only(keys, before.outcomes(rule_before)), only(keys, after.outcomes(rule)))
            if pairs.n == 0:
                table.append((label, name, "", "", "no pairs", ""))
            else:
                decided = f"{pairs.n}: +{pairs.only_after} -{pairs.only_before}"
                table.append((label, name, str(pairs.before), str(pairs.after), str(pairs), decided))
    return aligned(table)


def parts_of(keys: Sequence[EpisodeKey]) -> dict[str, list[EpisodeKey]]:
    """The episodes of each part of a table: every task, every suite, and what else there are several of."""
    parts: dict[str, list[EpisodeKey]] = defaultdict(list)
    for key in keys:
        parts[f"{key.task_suite} {key.task_id}"].append(key)
    for key in keys:
        parts[f"{key.task_suite} all"].append(key)
    if len({key.task_suite for key in keys}) > 1:
        parts["all suites"] = list(keys)
    if len({key.fresh for key in keys}) > 1:
        for key in keys:
            parts["fresh states" if key.fresh else "official states"].append(key)
    return parts


def only(keys: Sequence[EpisodeKey], outcomes: Mapping[EpisodeKey, bool]) -> dict[EpisodeKey, bool]:
    """The outcomes of these episodes, as far as they were played."""
    return {key: outcomes[key] for key in keys if key in outcomes}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Join the cells of each row to a line, padded so that columns align."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
