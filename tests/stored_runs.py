"""Run folders that were never run, with known numbers in them, and what of a real run can be compared."""

import json
from dataclasses import asdict
from pathlib import Path

from configs.presets import PRESETS
from experiment.run_files import CONFIG_FILE, METRICS_FILE, MetricsRow, outcomes_path, read_metrics
from experiment.statistics import Successes
from experiment.stored_run import GREEDY, SAMPLED, TEACHER

# What differs between two runs of the same computation: how long it took, and how much memory.
VARYING = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/")

PROVENANCE = {
    "argv": ["--preset", "tiny", "--seed", "3", "--lr", "0.001"],
    "git": {"commit": "0123456789abcdef", "modified": True},
    "versions": {"python": "3.11.2", "torch": "2.15.0"},
    "machine": {"system": "Linux", "processor": "x86_64", "cpus": 2, "gpus": ["Some GPU"]},
}


def evaluation(step: int, teacher: int, greedy: int, sampled: int) -> dict:
    """The record of an evaluation in which so many of 20 episodes succeeded."""
    row = {"global_step": step, "update": step // 100, "time/eval": 7.0}
    for metric, k in ((TEACHER, teacher), (GREEDY, greedy), (SAMPLED, sampled)):
        row |= Successes(k, 20).metrics(metric)
    return row


def update(step: int, phase: int, **metrics) -> dict:
    """The record of an update that ended at `step`: the metrics of every update, and more."""
    return {
        "global_step": step,
        "update": step // 100,
        "schedule/phase": phase,
        "rollout/success_rate": 0.5,
        "rollout/time_s": 3.0,
        "time/update": 2.0,
        **metrics,
    }


ROWS = [
    evaluation(0, 9, 8, 4),
    update(100, 0, **{"distill/loss": 2.0, "distill/accuracy": 0.4, "train/grad_norm": 1.5}),
    update(200, 1, **{"train/clip_fraction": 0.125, "train/approx_kl": 0.01, "train/grad_norm": 0.5}),
    evaluation(200, 9, 12, 10),
    update(300, 2, **{"train/clip_fraction": 0.25, "train/approx_kl": 0.02, "train/grad_norm": None}),
    evaluation(300, 9, 11, 16),
]


def store(folder: Path, rows: list[dict], **settings) -> Path:
    """Write a run of the preset tiny with changed settings, which are named section__field."""
    config = asdict(PRESETS["tiny"])
    for name, value in settings.items():
        section, field = name.split("__")
        config[section][field] = value
    description = {"config": config, "looks": "official (0123abcd)", **PROVENANCE}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(description))
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def store_outcomes(folder: Path, step: int, **successes: list[bool]) -> None:
    """Outcomes of an evaluation by actor: initial states 30, 31, ..., in turn of task 0 and task 4."""
    outcomes = {
        actor: [
            {"task_id": i % 2 * 4, "init_state_id": 30 + i, "trial": 0, "success": success, "env_steps": 50}
            for i, success in enumerate(actor_successes)
        ]
        for actor, actor_successes in successes.items()
    }
    path = outcomes_path(folder, step)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(outcomes))


def comparable_metrics(run: Path) -> list[MetricsRow]:
    """The records of a run without what varies: equal runs have equal ones."""
    return [
        {metric: value for metric, value in row.items() if not metric.startswith(VARYING)}
        for row in read_metrics(run / METRICS_FILE)
    ]
