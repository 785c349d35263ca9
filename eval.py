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

from interrupts import leave_at_once

if __name__ == "__main__":
    leave_at_once("eval.py")  # on Ctrl-C; later main_guard stops in good order

from configs.cli import answer_at_once, main_guard
from configs.config import EvalConfig, parse_eval

if __name__ == "__main__":
    answer_at_once("eval.py", parse_eval)  # --help and wrong flags, before the seconds that the imports below take

from assembly import env_spec, load_policy, weights_fingerprint
from configs.config import PolicyConfig, RunConfig, TaskConfig, TrainConfig
from configs.config import Suite
from envs.assets import describe_assets
from envs.libero import EnvSpec, task_info
from envs.pool import make_pool
from envs.tasks import task_names
from errors import BadInput
from locks import sole_writer
from rl.eval_plan import Key, Plan, Task, episode_of, make_plan
from rl.evaluation import evaluate
from rl.never_fatal import never_fatal
from rl.progress import progress_bar
from rl.results import PlayedEpisode, Results, Settings, check_comparable, open_results, read_results, save_results
from rl.results_table import results_table
from rl.rollout import Acting, Batching
from rl.run import provenance
from rl.trajectory import Trajectory
from rl.video import write_video
from vla.policy import Policy
from vla.probes import attention_probe, image_probe
from vla.tokens import select_key


def main(argv: Sequence[str]) -> None:
    config = parse_eval(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    out = Path(config.out or time.strftime(f"runs/eval-%Y%m%d-%H%M%S-{os.getpid()}.json"))
    plan = make_plan(
        tasks_of(config), config.trials, config.first_init_state, {"protocol": config.protocol, **provenance(argv)}
    )
    with sole_writer(out, f"--out {out}"):
        evaluate_all(config, plan, out)


def evaluate_all(config: EvalConfig, plan: Plan, out: Path) -> None:
    """Play what is missing of the plan, for one checkpoint or the two of a comparison, and print the results."""
    wanted = config.compare_with
    before = read_results(Path(wanted), "--compare-with") if wanted is not None and wanted.endswith(".json") else None
    try:
        results = play(config, plan, out, before)
        if wanted is not None and before is None:
            before = play(replace(config, checkpoint=wanted), plan, out.with_name(f"{out.stem}-before.json"), results)
    except KeyboardInterrupt:
        print(f"stopped; finished episodes are kept: the same command with --out {out} goes on", flush=True)
        raise
    save_results(results, plan, before)
    print("\n".join(results_table(results, plan)))
    if before is not None:
        print(f"\nbefore: {before.settings.checkpoint} ({before.settings.mode}), {before.path}")
        print("\n".join(results_table(results, plan, before)))
    print(f"results: {out}")


def play(config: EvalConfig, plan: Plan, out: Path, other: Results | None) -> Results:
    """Play the episodes that the results file still lacks, suite by suite. `other`: what they will be compared with."""
    results: Results | None = None
    for suite in config.suites:
        settings = train_config(config, suite)
        policy = load_policy(settings)  # for each suite: statistics, and with them actions, are the suite's
        if results is None:
            attention_probe(policy)
            image_probe(policy)
            for later in plan.suites:  # now, not after the hours that the first suites take
                select_key(policy.info.statistics, later, config.unnorm_key)
            results = open_results(out, settings_of(config, policy), plan)
            if other is not None:
                check_comparable(other, results.settings, plan)
            save_results(results, plan)
            print(f"{config.checkpoint}: {policy.kind}, {results.settings.mode}; assets: {results.settings.assets}")
            if config.protocol is not None and config.assets != "official":
                print("published results were taken with LIBERO's own pictures: --assets official")
            if results.episodes:
                print(f"{out}: {len(results.episodes)} of {len(plan.keys)} episodes are there already", flush=True)
        missing = [key for key in plan.keys if key.task_suite == suite and key not in results.episodes]
        if missing:
            play_suite(config, policy, env_spec(settings.task, policy.num_images), plan, missing, results)
        del policy  # before the next one needs its memory
    assert results is not None, "there is a suite"
    return results


def play_suite(
    config: EvalConfig, policy: Policy, spec: EnvSpec, plan: Plan, missing: Sequence[Key], results: Results
) -> None:
    """Play the `missing` episodes of one suite; each is in the file as soon as it has ended."""
    keys = {episode_of(key).index: key for key in missing}
    mode = results.settings.mode
    acting = Acting(
        epsilon=1.0 if mode == "l1" else 0.0,
        temperature=results.settings.temperature or 1.0,
        teacher_mode="l1",
        student_mode="sample" if mode == "sample" else "greedy",
        keep_observations=False,
    )
    with (
        make_pool(spec, config.num_envs, policy.prepare) as pool,
        progress_bar(f"{spec.task_suite}: episodes", len(missing)) as on_episodes,
    ):

        def keep(trajectory: Trajectory) -> None:
            results.add(played_episode(config, results, keys[trajectory.episode.index], trajectory))
            trajectory.frames.clear()
            save_results(results, plan)
            on_episodes(1)

        collected = evaluate(
            policy,
            pool,
            [episode_of(key) for key in missing],
            acting,
            config.seed,
            Batching(config.max_batch),
            record=lambda _: config.video != "none",
            on_finished=keep,
        )
    speed = collected.env_steps / collected.wall_s
    print(f"{spec.task_suite}: {len(missing)} episodes, {speed:.0f} env steps/s, {collected.wall_s:.0f} s", flush=True)


def tasks_of(config: EvalConfig) -> list[Task]:
    """The tasks of all suites, without building an env. Raises BadInput for one that does not exist."""
    return [
        Task(suite, info.task_id, info.name, info.instruction, info.max_env_steps, info.num_init_states)
        for suite in config.suites
        for info in task_info(env_spec(train_config(config, suite).task, num_images=1))
    ]


def train_config(config: EvalConfig, suite: Suite) -> TrainConfig:
    """The part of a training configuration that loads policy and simulator for a suite."""
    names = task_names(suite) if config.bddl_file is None else ("",)
    return TrainConfig(
        task=TaskConfig(
            task_suite=suite,
            task_ids=config.task_ids or tuple(range(len(names))),
            bddl_file=config.bddl_file,
            assets=config.assets,
        ),
        policy=PolicyConfig(
            checkpoint=config.checkpoint,
            unnorm_key=config.unnorm_key,
            device=config.device,
            compile=config.compile,
            data_parallel=config.data_parallel,
            dtype=config.dtype,
            load_in_4bit=config.load_in_4bit,
        ),
        run=RunConfig(seed=config.seed),
    )


def settings_of(config: EvalConfig, policy: Policy) -> Settings:
    mode = choose_mode(config, policy)
    bddl = None if config.bddl_file is None else hashlib.sha256(Path(config.bddl_file).read_bytes()).hexdigest()
    return Settings(
        checkpoint=config.checkpoint,
        weights=weights_fingerprint(policy),
        mode=mode,
        temperature=(config.temperature or 1.0) if mode == "sample" else None,
        seed=config.seed,
        assets=describe_assets(config.assets),
        bddl_sha256=bddl,
        device=policy.device.type,
        dtype=policy.precision,
    )


def choose_mode(config: EvalConfig, policy: Policy) -> str:
    """`greedy`, `sample` or `l1`. Raises BadInput when the checkpoint has no L1 head."""
    if config.mode == "l1" and policy.action_head is None:
        raise BadInput(f"--mode l1: {config.checkpoint} ships no action head")
    if config.mode != "auto":
        return config.mode
    if config.temperature is not None:
        return "sample"
    is_adapter = (Path(config.checkpoint) / "adapter_config.json").is_file()  # trained on tokens, whatever its base is
    return "l1" if policy.action_head is not None and not is_adapter else "greedy"


def played_episode(config: EvalConfig, results: Results, key: Key, trajectory: Trajectory) -> PlayedEpisode:
    """The record of an episode; writes its video if that is wanted."""
    video = None
    if config.video == "all" or (config.video == "failures" and not trajectory.success):
        outcome = "success" if trajectory.success else "failure"
        repeat = f"-repeat_{key.repeat}" if key.repeat else ""
        name = f"{key.task_suite}-task_{key.task_id}-init_state_{key.init_state_id}{repeat}-{outcome}.mp4"
        relative = f"{results.path.stem}-videos/{name}"
        with never_fatal(f"{name} could not be written", "the evaluation goes on"):
            write_video(results.path.parent / relative, trajectory.frames)
            video = relative
    return PlayedEpisode(
        *key,
        seed=config.seed,
        mode=results.settings.mode,
        success=trajectory.success,
        env_steps=trajectory.env_steps,
        decisions=len(trajectory.decisions),
        seconds=round(trajectory.seconds, 3),
        error=trajectory.fault,
        video=video,
    )


if __name__ == "__main__":
    sys.exit(main_guard("eval.py", main))
