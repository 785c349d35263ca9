"""Write the page that a volunteer sends: FOLDER/result.md, from the files of scripts/first_7b.sh, complete or not.

    python -m benchmarks.first_7b_report FOLDER

The page goes into docs/COMMUNITY_RESULTS.md as it is. Of messages and command lines it shows no paths.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.data_parallel import measure_rates
from command_line import main_guard
from contracts import BadInput, read_json
from experiment.reported import compare_with_reports, hub_id_of
from experiment.results import Results, read_results
from experiment.run_files import MetricsRow
from experiment.statistics import compare, count_successes
from experiment.stored_run import (
    GREEDY,
    SAMPLED,
    TEACHER,
    StoredRun,
    Training,
    changes,
    hours,
    read_run,
    was_trained_on,
)

ROW_HEADS = (
    "policy",
    "suite, tasks",
    "looks",
    "greedy before",
    "greedy after",
    "on the same states",
    "env steps",
    "hours, GPU-hours",
    "hardware",
    "from",
)
# The steps of scripts/first_7b.sh. The output of step S is in S.log, and until the step has ended in S.unfinished.
STEPS = {
    "machine": "facts of the machine",
    "check": "`train_grpo.py --check-only`",
    "start": "the start, greedy",
    "speed": "milliseconds",
    "memory": "a short run with simulators",
    "run": "the default run",
    "end": "the end, greedy, paired with the start",
}


def write_page(folder: Path) -> str:
    """The text of the page."""
    machine = read_json(folder / "machine.json") if (folder / "machine.json").exists() else {}
    start = read_evaluation(folder / "start.json")
    end = read_evaluation(folder / "end.json")
    run = find_run(folder)
    parts = [
        f"### {policy_name(start)} on {gpu_name(machine)}",
        table([ROW_HEADS, result_row(machine, start, end, folder)]),
        machine_section(machine),
        steps_section(folder),
    ]
    if start is not None:
        parts.append(success_section(start, end, folder))
    for name, title in (("speed", "Milliseconds"), ("memory", "A short run with simulators")):
        if (folder / f"{name}.json").exists():
            parts.append(measured_section(title, read_json(folder / f"{name}.json")))
    if run is not None:
        parts.append(run_section(run, folder / "run.json"))
    return "\n\n".join(parts) + "\n"


def read_evaluation(path: Path) -> Results | None:
    return read_results(path) if path.exists() else None


def find_run(folder: Path) -> StoredRun | None:
    """The run that can be resumed, as scripts/first_7b.sh finds it."""
    checkpoints = sorted(folder.glob("runs/*/checkpoints/latest"))
    return read_run(checkpoints[-1].parents[1]) if checkpoints else None


def table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines)


def without_paths(text: str) -> str:
    """The text with PATH in place of every absolute path, which may name a user."""
    return re.sub(r"(?<![\w.])~?/[^\s'\",;:)]+", "PATH", text)


def policy_name(results: Results | None) -> str:
    """The hub id of the checkpoint, or the last part of its folder's name."""
    if results is None:
        return "checkpoint not evaluated"
    checkpoint = results.settings["checkpoint"]
    return hub_id_of(checkpoint) or Path(checkpoint).name


def gpu_name(machine: dict) -> str:
    return machine["gpu"]["name"] if machine.get("gpu") else "CPU"


def result_row(machine: dict, start: Results | None, end: Results | None, folder: Path) -> list[str]:
    """The row of the table in docs/COMMUNITY_RESULTS.md. What was not reached is a dash."""
    row = dict.fromkeys(ROW_HEADS, "-")
    row["policy"] = policy_name(start)
    row["hardware"] = gpu_name(machine)
    row["from"] = "your name, if you like"
    if start is not None:
        first = next(iter(start.episodes))
        row["suite, tasks"] = f"{first.task_suite}, task {first.task_id}"
        row["looks"] = start.settings["assets"]
        row["greedy before"] = str(count_successes(start.outcomes().values()))
    if start is not None and end is not None:
        row["greedy after"] = str(count_successes(end.outcomes().values()))
        row["on the same states"] = str(compare(start.outcomes(), end.outcomes()))
        training = read_training(folder)
        row["env steps"] = f"{training['env_steps']:,}"
        row["hours, GPU-hours"] = f"{training['hours']:.2f}, {training['gpu_hours']:.2f}"
    return [row[head] for head in ROW_HEADS]


def read_training(folder: Path) -> Training:
    return read_json(folder / "end.json")["training"]


def machine_section(machine: dict) -> str:
    facts = [f"{name}: {value}" for name, value in machine.items()]
    return "\n".join(["Machine:", "", "```", *facts, "```"])


def steps_section(folder: Path) -> str:
    rows = [("step", "how it went")]
    rows += [(title, step_status(folder, name)) for name, title in STEPS.items()]
    return table(rows)


def step_status(folder: Path, name: str) -> str:
    """Whether a step is done, with the warnings of the checks; and the last line of one that is not."""
    log = folder / f"{name}.log"
    unfinished = folder / f"{name}.unfinished"
    if log.exists():
        warnings = [line for line in log.read_text().splitlines() if line.startswith("warning ")]
        shown = [without_paths(" ".join(line.split())) for line in dict.fromkeys(warnings)]
        return "; ".join(["done", *shown])
    if unfinished.exists():
        lines = unfinished.read_text().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no output")
        return f"not finished: {without_paths(last)}".replace("|", "/")
    return "not reached"


def success_section(start: Results, end: Results | None, folder: Path) -> str:
    """The start beside what others report, and of the end how many of its initial states were held out."""
    settings = start.settings
    first = min(start.episodes)  # all are of one task
    before = count_successes(start.outcomes().values())
    reported = compare_with_reports(
        settings["checkpoint"],
        first.task_suite,
        [first.task_id],
        settings["mode"],
        before,
        settings["assets"],
    )
    lines = [f"Start, {settings['mode']}: {before if reported is None else reported.sentence}."]
    if end is not None:
        pairs = compare(start.outcomes(), end.outcomes())
        lines.append(
            f"End, the run's last checkpoint, {end.settings['mode']}: {pairs.after}, of the {pairs.n} states "
            f"{pairs.only_after} won and {pairs.only_before} lost (exact McNemar test)."
        )
        lines.append(held_out_text(start, end, read_training(folder)))
    return "\n".join(lines)


def held_out_text(start: Results, end: Results, training: Training) -> str:
    """How many of the states the run has not trained on, and the result on these if they are not all."""
    after = end.outcomes()
    held_out = {
        key: success
        for key, success in after.items()
        if not was_trained_on(training, key.task_suite, key.task_id, key.init_state_id)
    }
    text = f"The run has trained on {len(after) - len(held_out)} of these states."
    if 0 < len(held_out) < len(after):
        pairs = compare(start.outcomes(), held_out)
        text += f" On the others: {pairs.before} before, {pairs.after} after, {pairs}."
    return text


def measured_section(title: str, measured: dict) -> str:
    """What `benchmarks.first_7b measure` has kept of a step."""
    lines = [f"{title}, {measured['seconds']} s in all{peak_text(measured)}:", "", "```"]
    lines += [without_paths(line) for line in measured["printed"]]
    return "\n".join([*lines, "```"])


def peak_text(measured: dict) -> str:
    gpu = measured["gpu"]
    if gpu is None:
        return ""
    return (
        f"; peak of the whole GPU {gpu['peak'] / 1024:.2f} of {gpu['total'] / 1024:.2f} GiB, "
        f"of which {gpu['at_start'] / 1024:.2f} were in use before"
    )


def run_section(run: StoredRun, measured_file: Path) -> str:
    """The run: its command, its time by part, its rates, and success in its own evaluations."""
    arguments = " ".join(run.description["argv"])
    lines = [f"The run: `train_grpo.py {without_paths(arguments)}`. {run.status()}."]
    if measured_file.exists():
        measured = read_json(measured_file)
        lines.append(f"Whole command {measured['seconds'] / 60:.1f} minutes{peak_text(measured)}.")
    updates = [row for row in run.rows if "train/epochs" in row]
    if updates:
        lines.append(rates_text(updates[1:] or updates))
    if len(run.evaluations) > 1:
        lines += [f"* {change}" for change in changes(run)]
    sections = ["\n".join(lines), table([("part", "minutes"), *minutes_by_part(run.rows)])]
    if run.evaluations:
        sections.append(table(table_of_evaluations(run)))
    return "\n\n".join(sections)


def rates_text(updates: Sequence[MetricsRow]) -> str:
    rates = measure_rates(list(updates))
    epochs = median(row["train/epochs"] for row in updates)
    peak = max(row.get("system/gpu_mem_gb", 0.0) for row in updates)
    return (
        f"Medians of {len(updates)} updates: {rates.env_steps_per_s:.0f} env steps/s of rollouts, "
        f"{rates.samples_per_s:.1f} samples/s of updates, {epochs:g} epochs; peak of tensors {peak:.1f} GiB."
    )


def minutes_by_part(rows: Sequence[MetricsRow]) -> list[tuple[str, str]]:
    parts = {"rollouts": "rollout/time_s", "updates": "time/update"}
    parts |= {"evaluations": "time/eval", "checkpoints": "time/checkpoint"}
    minutes = {part: sum(row.get(metric, 0.0) for row in rows) / 60 for part, metric in parts.items()}
    minutes["all"] = 60 * hours(rows)
    return [(part, f"{value:.1f}") for part, value in minutes.items()]


def table_of_evaluations(run: StoredRun) -> list[tuple[str, ...]]:
    rows = [("env steps", "teacher", "student, greedy", "student, sampled")]
    for evaluation in run.evaluations:
        cells = [f"{evaluation['global_step']:,}"]
        for metric in (TEACHER, GREEDY, SAMPLED):
            has_metric = f"{metric}_k" in evaluation
            cells.append(
                f"{evaluation[f'{metric}_k']:.0f}/{evaluation[f'{metric}_n']:.0f}" if has_metric else "-"
            )
        rows.append(tuple(cells))
    return rows


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("benchmarks.first_7b_report", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where scripts/first_7b.sh keeps its files")
    folder = parser.parse_args(argv).folder
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder: give the one in which scripts/first_7b.sh keeps its files")
    page = folder / "result.md"
    page.write_text(write_page(page.parent))
    print(f"wrote {page}: read it once, then send it as docs/COMMUNITY_RESULTS.md says")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.first_7b_report", main))
