"""Run folders that were never run, with known numbers in them, and what of a real run can be compared."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from configs.presets import PRESETS
from experiment.episodes import EpisodeKey, EpisodeResult, Rule
from experiment.results import Results, Settings, write_results
from experiment.stored_run import CONFIG_FILE, METRICS_FILE, MetricsRow, evaluation_path, read_metrics

# What differs between two runs of the same computation: how long it took, and how much memory.
VARYING = ("time/", "rollout/time_s", "rollout/env_steps_per_s", "train/time_s", "system/")

PROVENANCE = {
    "git": {"commit": "0123456789abcdef", "modified": True},
    "versions": {"python": "3.11.2", "torch": "2.15.0"},
    "machine": {"system": "Linux", "cpus": 2, "gpus": ["Some GPU"], "gpu_gib": [80.0]},
}


def evaluation(step: int) -> dict:
    """The record of an evaluation; its episodes are in a file of their own (`store_episodes`)."""
    return {
        "global_step": step,
        "update": step // 100,
        "time/eval": 7.0,
        "eval/greedy_success": 0.5,
        "eval/sampled_success": 0.25,
    }


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
    evaluation(0),
    update(100, 0, **{"distill/accuracy": 0.4, "train/grad_norm": 1.5}),
    update(200, 1, **{"train/approx_kl": 0.01, "train/grad_norm": 0.5}),
    evaluation(200),
    update(300, 2, **{"train/approx_kl": 0.02, "train/grad_norm": None}),
    evaluation(300),
]


def store(folder: Path, rows: list[dict], argv: Sequence[str] = (), **settings) -> Path:
    """Write a run of the preset tiny with changed settings, which are named section__field."""
    config = asdict(PRESETS["tiny"])
    for name, value in settings.items():
        section, field = name.split("__")
        config[section][field] = value
    description = {"config": config, "looks": "official", "simulator": "mujoco 3", "argv": argv, **PROVENANCE}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(description))
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SETTINGS = Settings(
    checkpoint="runs/R/checkpoints/best",
    weights="abc",
    seed=0,
    assets="low-poly",
    simulator="mujoco 3.3.0",
    bddl_sha256=None,
    init_states_sha256=None,
    device="cpu",
    frozen_weights="float32",
    max_env_steps=None,
    unnorm_key=None,
    num_images=1,
)
RULES = {
    "teacher": Rule("greedy", actor="teacher"),
    "head": Rule("l1", actor="teacher"),
    "greedy": Rule("greedy"),
    "sampled": Rule("sample", 0.6),
}


def episode(
    key: EpisodeKey, rule: Rule, success: bool, env_steps: int = 50, video: str | None = None
) -> EpisodeResult:
    """How an episode ended, in which nothing else matters."""
    decision = (rule.actor, rule.mode, rule.temperature)
    return EpisodeResult(*key, *decision, success, env_steps, 7, 1.5, None, None, video)


def store_episodes(folder: Path, step: int, task_ids: tuple[int, ...] = (0,), **solved: str) -> None:
    """The file of an evaluation. `solved`, by rule: a 1 for each initial state that is solved; tasks take turns.

    The first episode of each rule but the sampled one is filmed.
    """
    episodes = []
    for rule, outcomes in solved.items():
        for place, outcome in enumerate(outcomes):
            key = EpisodeKey("libero_spatial", task_ids[place % len(task_ids)], False, 30 + place)
            video = f"{rule}.mp4" if place == 0 and rule != "sampled" else None
            episodes.append(episode(key, RULES[rule], outcome == "1", video=video))
    path = evaluation_path(folder, step)
    path.parent.mkdir(exist_ok=True)
    write_results(path, Results(SETTINGS, {}, episodes))


def comparable_metrics(run: Path) -> list[MetricsRow]:
    """The records of a run without what varies: equal runs have equal ones."""
    return [
        {metric: value for metric, value in row.items() if not metric.startswith(VARYING)}
        for row in read_metrics(run / METRICS_FILE)
    ]
