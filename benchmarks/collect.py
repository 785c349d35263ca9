"""Write one compact file of an experiment from its run folders and results files; prints its size.

    python -m benchmarks.collect docs/results/NAME.json RUN ... [--results FILE ...] [--note TEXT]

RUN: folders of train_grpo.py, one for each seed. FILE: results files of eval.py, of checkpoints of these runs or of
their start. docs/results/README.md explains the fields. benchmarks.plot and benchmarks.compare read the file.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from command_line import main_guard, parse_flags

# What plots and tables need of an update.
UPDATE_FIELDS = (
    "global_step",
    "rollout/success_rate",
    "rollout/trajectories",
    "rollout/teacher_fraction",
    "rollout/time_s",
    "distill/accuracy",
    "train/approx_kl",
    "train/entropy",
    "train/first_ratio_error",
    "train/lr",
    "time/update",
    "system/gpu_mem_gb",
)
RATES = {
    "teacher": "eval/teacher_success",
    "greedy": "eval/student_success",
    "sampled": "eval/student_sampled_success",
}


@dataclass(frozen=True)
class Args:
    out: tyro.conf.Positional[Path]
    """File to write."""
    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Run folders."""
    results: tuple[Path, ...] = ()
    """Results files of eval.py."""
    note: str = ""
    """What a reader should know: the machine beside it, what was planned, what went wrong."""


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.collect", description=__doc__)
    experiment = {
        "note": args.note,
        "runs": [collect_run(folder) for folder in args.runs],
        "results": [collect_results(path) for path in args.results],
    }
    args.out.write_text(json.dumps(experiment, separators=(",", ":")) + "\n")
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e3:.1f} kB")


def collect_run(folder: Path) -> dict[str, object]:
    """The command, commit and machine of a run, its updates as columns, and its evaluations."""
    description = json.loads((folder / "config.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "rollout/success_rate" in row]
    fields = [name for name in UPDATE_FIELDS if any(name in row for row in updates)]
    return {
        "run": folder.name,
        "seed": description["config"]["run"]["seed"],
        "temperature": description["config"]["rollout"]["temperature"],
        "argv": description["argv"],
        "commit": description["git"].get("commit"),
        "machine": description["machine"],
        "updates": {name: [rounded(row.get(name)) for row in updates] for name in fields},
        "evaluations": [collect_evaluation(row) for row in rows if RATES["greedy"] in row],
    }


def collect_evaluation(row: dict[str, float]) -> dict[str, float | None]:
    """When an evaluation was, its number of episodes, and the successes of whoever played."""
    evaluation = {"global_step": row["global_step"], "episodes": row[f"{RATES['greedy']}_n"]}
    for name, metric in RATES.items():
        if metric in row:
            evaluation[name] = rounded(row[metric])
    return evaluation


def collect_results(path: Path) -> dict[str, object]:
    """How a checkpoint was played, and the success of every episode: a string of 0 and 1 for each task."""
    results = json.loads(path.read_text())
    settings = results["settings"]
    outcomes = defaultdict(dict)
    for episode in results["episodes"]:
        task = f"{episode['task_suite']} {episode['task_id']}"
        if settings.get("init_states") == "fresh":
            task += " fresh"
        outcomes[task][episode["init_state_id"], episode["repeat"]] = episode["success"]
    return {
        "checkpoint": settings["checkpoint"],
        "mode": settings["mode"],
        "temperature": settings["temperature"],
        "commit": results["git"].get("commit"),
        "machine": results["machine"],
        "successes": {
            task: "".join(str(int(states[state])) for state in sorted(states))
            for task, states in outcomes.items()
        },
    }


def rounded(value: float | None) -> float | None:
    """Four digits are enough for a plot. Numbers of env steps stay whole."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.collect", main))
