#!/usr/bin/env python
"""Measure the success rate of a checkpoint on LIBERO tasks.

    python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --out results.json
    python eval.py --checkpoint runs/RUN/checkpoints/best --compare-with CHECKPOINT --task-ids 0
    python eval.py --checkpoint CHECKPOINT --protocol libero --task-suite all --num-envs 8 --out results.json

Episode i of a task starts from the benchmark's initial state i. Policies act greedily unless --temperature is given.
The same command goes on where it was stopped. Results file: docs/RESULTS_JSON.md.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.cli import main_guard, parse_eval
from configs.config import EvalConfig, Suite
from contracts import BadInput, first_line, resolve_pointer
from envs.assets import find_pack
from envs.libero import EnvSpec
from envs.perturb import KINDS, MAGNITUDES, NONE, from_label
from envs.pool import make_pool, task_info
from envs.tasks import task_names
from experiment.metrics import progress_bar
from experiment.results import (
    Key,
    Plan,
    Results,
    make_plan,
    open_results,
    read_results,
    results_table,
    save_results,
)

if TYPE_CHECKING:  # these take seconds to import: --help and wrong flags are answered before
    from rl.trajectory import Episode, Trajectory
    from vla.policy import Policy


def main(argv: Sequence[str]) -> None:
    """Play what is missing of the plan, for one checkpoint or the two of a comparison, and print the results."""
    config = parse_eval(argv)
    from experiment.report import training_of
    from experiment.run_folder import only_writer, provenance
    from preflight import choose_looks

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    out = Path(config.out or time.strftime(f"runs/eval-%Y%m%d-%H%M%S-{os.getpid()}.json"))
    tasks = {str(suite): task_info(recipe(config, suite)) for suite in config.suites}
    head, labels = {"protocol": config.protocol, **provenance(argv)}, config.simulator.perturbations
    head["training"] = training_of(Path(str(config.model.checkpoint)))
    plan = make_plan(tasks, config.trials, config.first_init_state, head, labels, config.samples)

    config, _ = choose_looks(config)
    lock = only_writer(out.with_name(f".{out.name}.lock"), f"--out {out}")
    wanted = config.compare_with
    before = read_results(Path(wanted)) if wanted is not None and wanted.endswith(".json") else None
    results = play(config, plan, out, before)
    if wanted is not None and before is None:
        config_before = replace(config, model=replace(config.model, checkpoint=wanted))
        plan_before = replace(plan, head={**plan.head, "training": training_of(Path(wanted))})
        before = play(config_before, plan_before, out.with_name(f"{out.stem}-before.json"), results)
    save_results(results, plan, before)
    lock.release()

    print(*results_table(results, plan), sep="\n")
    if before is not None:
        print(f"\nbefore: {before.settings['checkpoint']} ({before.settings['mode']}), {before.path}")
        print(*results_table(results, plan, before), sep="\n")
    if labels:
        from experiment.robustness import draw_perturbations, perturbation_table  # which takes matplotlib

        print("", *perturbation_table(results, labels, before), sep="\n")
        print(f"picture: {draw_perturbations(results, labels, before, out.with_suffix('.png'))}")
    print(f"results: {out}")


def play(config: EvalConfig, plan: Plan, out: Path, other: Results | None) -> Results:
    """Play the episodes that the results file still lacks, suite by suite. `other`: what they will be compared with."""
    from experiment.run_folder import interruptible
    from preflight import check_looks, load_policy
    from rl.selfcheck import Caution, attention_probe, image_probe
    from vla.dataset_statistics import select_key

    model = config.model
    for suite in config.suites:
        policy = load_policy(
            model, suite
        )  # for each suite: statistics, and with them actions, are the suite's
        if suite == config.suites[0]:
            attention_probe(policy)
            image_probe(policy)
            for later in config.suites:  # now, not after the hours that the first suites take
                select_key(policy.info.statistics, later, model.unnorm_key)
            results = open_results(out, settings_of(config, policy), plan, other)
            save_results(results, plan)
            settings = results.settings
            print(f"{model.checkpoint}: {policy.kind}, {settings['mode']}; assets: {settings['assets']}")
            if isinstance(looks := check_looks(policy.info, config.simulator.assets), Caution):
                print(looks)
            if config.protocol is not None and not settings["assets"].startswith("official"):
                print("published results were taken with LIBERO's own pictures: --assets official")
            if results.episodes:
                print(
                    f"{out}: {len(results.episodes)} of {len(plan.keys)} episodes are there already",
                    flush=True,
                )
        missing = [key for key in plan.keys if key.task_suite == suite and key not in results.episodes]
        if missing:
            try:
                with interruptible():
                    play_suite(config, policy, suite, plan, missing, results)
            except KeyboardInterrupt:
                print(
                    f"stopped; finished episodes are kept: the same command with --out {out} goes on",
                    flush=True,
                )
                raise
        del policy  # before the next one needs its memory
    return results


def play_suite(
    config: EvalConfig, policy: Policy, suite: Suite, plan: Plan, missing: Sequence[Key], results: Results
) -> None:
    """Play the `missing` episodes of one suite; each is in the file as soon as it has ended."""
    from experiment.evaluation import evaluate

    keys, simulator = {episode_of(key, config.seed): key for key in missing}, config.simulator
    with (
        make_pool(
            recipe(config, suite, policy.num_images), simulator.num_envs, policy.prepare, simulator.simulators
        ) as pool,
        progress_bar(f"{suite}: episodes", len(missing)) as on_episodes,
    ):

        def keep(trajectory: Trajectory) -> None:
            key = keys[trajectory.episode]
            results.episodes[key] = episode_record(config, results, key, trajectory)
            trajectory.frames.clear()
            save_results(results, plan)
            on_episodes(1)

        played = evaluate(
            policy, pool, list(keys), results.settings["mode"], results.settings["temperature"] or 1.0, config.seed,
            max_batch=config.model.max_batch, record=lambda _: config.video != "none", on_finished=keep,
        )  # fmt: skip
    print(f"{suite}: {len(missing)} episodes, {played.env_steps / played.wall_s:.0f} env steps/s", flush=True)


def recipe(config: EvalConfig, suite: Suite, num_images: int = 1) -> EnvSpec:
    """The simulator's recipe for a suite. Raises BadInput for a task that does not exist."""
    simulator = config.simulator
    task_ids = (0,) if simulator.bddl_file else config.task_ids or tuple(range(len(task_names(suite))))
    cap, kept = simulator.max_env_steps, simulator.kept_tasks
    return EnvSpec(suite, task_ids, num_images, simulator.assets, simulator.bddl_file, cap, kept)


def episode_of(key: Key, seed: int = 0) -> Episode:
    """The episode to play. Its number, and with it its random stream, is a function of the key alone.

    What a perturbation draws depends on the seed, the task and the initial state, and is alike for all magnitudes.
    """
    from rl.rollout import seed_sequence
    from rl.trajectory import Episode

    # Strides above the number of tasks of any suite (90) and of initial states of any task.
    index = (key.repeat * 10_000 + key.init_state_id) * 100 + key.task_id
    (own_seed,) = seed_sequence(seed, "perturb", key.task_id, key.init_state_id).generate_state(1).tolist()
    if change := from_label(key.perturbation, own_seed):
        index += 10**9 * (1 + len(MAGNITUDES) * KINDS.index(change.kind) + change.magnitude)
    return Episode(index, key.task_id, key.init_state_id, group=index, perturbation=change)


def settings_of(config: EvalConfig, policy: Policy) -> dict[str, Any]:
    """Everything beside the episode that decides how it ends: one file holds episodes of equal settings."""
    from preflight import weights_fingerprint

    checkpoint, bddl, mode = str(config.model.checkpoint), config.simulator.bddl_file, config.mode
    if mode == "l1" and policy.action_head is None:
        raise BadInput(f"--mode l1: {checkpoint} ships no action head")
    if mode == "auto":
        is_adapter = (
            resolve_pointer(Path(checkpoint)) / "adapter_config.json"
        ).is_file()  # trained on tokens
        mode = "greedy" if policy.action_head is None or is_adapter else "l1"
        mode = "sample" if config.samples else mode
    return {
        "checkpoint": checkpoint,
        "weights": weights_fingerprint(policy),  # `best` is a pointer that moves
        "mode": mode,
        "temperature": (config.temperature or 1.0) if mode == "sample" else None,
        "seed": config.seed,
        "assets": str(find_pack(config.simulator.assets)),
        "bddl_sha256": None if bddl is None else hashlib.sha256(Path(bddl).read_bytes()).hexdigest(),
        "device": policy.device.type,
        "frozen_weights": policy.frozen_weights,
    }


def episode_record(config: EvalConfig, results: Results, key: Key, trajectory: Trajectory) -> dict[str, Any]:
    """The record of an episode (docs/RESULTS_JSON.md); writes its video if that is wanted."""
    from experiment.evaluation import write_video

    video = None
    if config.video == "all" or (config.video == "failures" and not trajectory.success):
        ending = (f"-repeat_{key.repeat}" if key.repeat else "") + (
            "-success" if trajectory.success else "-failure"
        )
        perturbed = "" if key.perturbation == NONE else f"-{key.perturbation}"
        name = f"{key.task_suite}-task_{key.task_id}-init_state_{key.init_state_id}{perturbed}{ending}.mp4"
        video = f"{results.path.stem}-videos/{name}"
        try:
            write_video(results.path.parent / video, trajectory.frames)
        except Exception as error:
            logging.warning("%s could not be written (%s); the evaluation goes on", name, first_line(error))
            video = None
    return {
        **key._asdict(), "seed": config.seed, "mode": results.settings["mode"], "success": trajectory.success,
        "env_steps": trajectory.env_steps, "decisions": len(trajectory.decisions),
        "seconds": round(trajectory.seconds, 3), "error": trajectory.fault, "video": video,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main_guard("eval.py", main))
