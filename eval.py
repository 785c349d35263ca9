#!/usr/bin/env python
"""Measure the success rate of a checkpoint on LIBERO tasks.

    python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --out results.json
    python eval.py --checkpoint runs/RUN/checkpoints/best --compare-with CHECKPOINT --task-ids 0
    python eval.py --checkpoint CHECKPOINT --protocol libero --task-suite all --out results.json

Episode i of a task starts from the benchmark's initial state i. Policies act greedily unless --temperature is given.
A command with --out continues an interrupted evaluation. The results file is described in docs/RESULTS_JSON.md.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import main_guard
from configs.cli import parse_eval
from configs.eval_config import EvalConfig
from configs.sections import SimulatorConfig
from contracts import BadInput
from envs.assets import find_pack
from envs.env import EnvSpec
from envs.pool import Pool, make_pool, task_info
from envs.tasks import bddl_task, keep_compiled_code, split_suite, task_names
from experiment.eval_output import print_results
from experiment.results import (
    EpisodeKey,
    Plan,
    Results,
    make_plan,
    open_results,
    read_results,
    save_results,
)
from experiment.terminal import say, show_progress

if TYPE_CHECKING:  # these take seconds to import, and neither --help nor messages about flags need them
    from rl.rollout import Rollout
    from rl.trajectory import Trajectory
    from vla.policy import Policy

SAVE_INTERVAL_S = 10.0  # writing the file takes 0.2 s with 10,000 episodes in it


def main(argv: Sequence[str]) -> None:
    """Play the missing episodes of one checkpoint, or of the two of a comparison, and print the results."""
    config = parse_eval(argv)
    plan, results, before = play_planned(config, argv)
    print_results(config, results, plan, before)


def evaluate(config: EvalConfig) -> Results:
    """Evaluate from Python as the command does, without its tables. Raises BadInput."""
    _, results, _ = play_planned(config, argv=[])  # the calling script's flags are not those of an evaluation
    return results


def play_planned(config: EvalConfig, argv: Sequence[str]) -> tuple[Plan, Results, Results | None]:
    """Plan and play what is missing. Returns the plan, the results and those of --compare-with."""
    keep_compiled_code()
    from experiment.file_lock import locked
    from experiment.setup import choose_looks

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    out = Path(config.out or time.strftime(f"runs/eval-%Y%m%d-%H%M%S-{os.getpid()}.json"))
    plan = plan_episodes(config, argv)
    assets = choose_looks(config.simulator.assets, config.model, config.suites)
    # A simulator stays with its task until no episode of it is left, so earlier tasks need not be kept.
    config = replace(config, simulator=replace(config.simulator, assets=assets, kept_tasks=1))
    with locked(out.with_name(f".{out.name}.lock"), f"--out {out}"):
        try:
            results, before = play_all(config, plan, out)
        except KeyboardInterrupt:
            say(f"stopped; finished episodes are saved: to continue, run the same command with --out {out}")
            raise
    return plan, results, before


def play_all(config: EvalConfig, plan: Plan, out: Path) -> tuple[Results, Results | None]:
    """Play and save the missing episodes. Returns the results and those of --compare-with.

    If --compare-with names a checkpoint, that plays the same episodes, and its results file is STEM-before.json.
    """
    compare_with = config.compare_with
    if compare_with is None or compare_with.endswith(".json"):
        before = None if compare_with is None else read_results(Path(compare_with))
        results = play(config, plan, out, before)
    else:
        plan_before = replace(plan, header={**plan.header, **origin_of(compare_with)})
        config_before = replace(config, model=replace(config.model, checkpoint=compare_with))
        out_before = out.with_name(f"{out.stem}-before.json")
        check_evaluation(config_before, plan_before, out_before)
        results = play(config, plan, out, None)
        before = play(config_before, plan_before, out_before, results)
    save_results(results, plan, before)
    return results, before


def plan_episodes(config: EvalConfig, argv: Sequence[str]) -> Plan:
    """Plan the episodes that the command asks for. Raises BadInput for tasks or initial states that do not exist."""
    from experiment.provenance import provenance

    tasks = {suite: task_info(env_spec(config, suite)) for suite in config.suites}
    bddl_file = config.simulator.bddl_file
    header = {
        "protocol": config.protocol,
        "init_states": None if bddl_file is None else bddl_task(bddl_file).init_states_source,
        **provenance(argv),
        **origin_of(str(config.model.checkpoint)),
    }
    return make_plan(
        tasks,
        config.trials,
        config.first_init_state,
        header,
        samples=config.samples,
        fresh=config.init_states == "fresh",
    )


def origin_of(checkpoint: str) -> dict[str, object]:
    """The hub's commit that a checkpoint is of, and what its training took; None where that is not known."""
    from experiment.setup import find_commit
    from experiment.stored_run import read_training

    return {"hub_commit": find_commit(checkpoint), "training": read_training(Path(checkpoint))}


def play(config: EvalConfig, plan: Plan, out: Path, compared_with: Results | None) -> Results:
    """Play the planned episodes that the results file `out` lacks, suite by suite.

    `compared_with`: results of the other policy. Raises BadInput if `out` holds a different evaluation, or if the two
    cannot be compared.
    """
    from experiment.eval_episodes import settings_of
    from experiment.setup import load_policy

    results = None
    for suite in config.suites:
        if results is not None and not missing_episodes(plan, suite, results):
            continue
        # Load the policy again for each suite, because the action statistics differ between suites.
        policy = load_policy(config.model, suite)
        settings = settings_of(config, policy)
        if results is None:
            check_suites(config, policy)
            results = open_results(out, settings, plan, compared_with)
            print_start(config, policy, plan, results)
        if settings["weights"] != results.settings["weights"]:
            raise BadInput(
                f"--checkpoint {settings['checkpoint']} has changed since the suite before, as the pointers `best` and "
                "`latest` do while their run goes on: name a folder step_N, and another --out"
            )
        missing = missing_episodes(plan, suite, results)
        if missing:
            play_suite(config, policy, suite, plan, missing, results)
        del policy  # free its memory before the next one is loaded
    assert results is not None  # EvalConfig refuses an empty --task-suite
    return results


def check_evaluation(config: EvalConfig, plan: Plan, out: Path) -> None:
    """Raise BadInput if an evaluation cannot be played, before hours are spent on another one. Plays nothing.

    The policy is loaded for it, and once more when it plays.
    """
    from experiment.eval_episodes import settings_of
    from experiment.setup import load_policy

    policy = load_policy(config.model, config.suites[0])
    check_suites(config, policy)
    open_results(out, settings_of(config, policy), plan)


def missing_episodes(plan: Plan, suite: str, results: Results) -> list[EpisodeKey]:
    """The planned episodes of a suite that have not been played yet."""
    return [key for key in plan.keys if key.task_suite == suite and key not in results.episodes]


def check_suites(config: EvalConfig, policy: Policy) -> None:
    """Raise BadInput if the policy cannot act in one of the suites."""
    from vla.dataset_statistics import select_key

    for suite in config.suites:  # all suites now, before hours are spent on the first one
        base_suite, _ = split_suite(suite)
        select_key(policy.info.statistics_folder, policy.info.statistics, base_suite, config.model.unnorm_key)


def print_start(config: EvalConfig, policy: Policy, plan: Plan, results: Results) -> None:
    """Print what is evaluated and how, with warnings about the looks of the simulator."""
    from preflight import check_looks

    settings = results.settings
    say(f"{config.model.checkpoint}: {policy.info.kind}, {settings['mode']}; assets: {settings['assets']}")
    looks = check_looks(policy.info, find_pack(config.simulator.assets))
    if looks.status == "warning":
        say(looks.text)
    if config.protocol is not None and not settings["assets"].startswith("official"):
        say(
            "published results use LIBERO's own looks; for results that compare with them use --assets official"
        )
    if plan.header["init_states"] is not None:
        print(f"initial states: {plan.header['init_states']}")
    if results.episodes:
        num_played = len(results.episodes)
        say(f"{results.path}: {num_played} of {len(plan.keys)} episodes are there already")


def play_suite(
    config: EvalConfig,
    policy: Policy,
    suite: str,
    plan: Plan,
    missing: Sequence[EpisodeKey],
    results: Results,
) -> None:
    """Check the policy, and play the `missing` episodes of one suite."""
    from experiment.stopping import interruptible
    from rl.selfcheck import attention_probe, image_probe, made_up_observation

    tasks = {task.task_id: task for task in plan.tasks[suite]}
    observation = made_up_observation(policy, tasks[missing[0].task_id].instruction)
    spec = env_spec(config, suite, policy.num_images)
    num_envs = choose_num_envs(config.simulator, spec, policy, len(missing))
    prepare = policy.model_inputs.prepare_images
    with interruptible(), make_pool(spec, num_envs, prepare, config.simulator.simulators) as pool:
        pool.start_building(list(dict.fromkeys(key.task_id for key in missing)))
        attention_probe(policy, observation)
        image_probe(policy, observation)
        save_results(results, plan)
        pool.wait_until_built()
        rollout = play_and_save(config, policy, pool, plan, missing, results)
    recorded = dict(policy.describe()).get("recorded")
    ending = f"; recorded {recorded}" if recorded else ""
    say(f"{suite}: {len(rollout.trajectories)} episodes in {rollout.wall_s:.1f} s{ending}")


def play_and_save(
    config: EvalConfig,
    policy: Policy,
    pool: Pool,
    plan: Plan,
    keys: Sequence[EpisodeKey],
    results: Results,
) -> Rollout:
    """Play the episodes of one suite; save those that have ended every SAVE_INTERVAL_S, and at the end or a stop."""
    from experiment.eval_episodes import episode_of, episode_record
    from experiment.validation import evaluation_behaviour, evaluation_randomness
    from rl.rollout import play_episodes

    fresh = config.init_states == "fresh"
    episode_keys = {episode_of(key, fresh): key for key in keys}
    saved_at = 0.0  # so that the first episode is saved at once
    with show_progress(keys[0].task_suite, len(keys), "episodes") as activity:

        def keep(trajectory: Trajectory) -> None:
            nonlocal saved_at
            key = episode_keys[trajectory.episode]
            results.episodes[key] = episode_record(config, results, key, trajectory)
            trajectory.frames.clear()
            if time.monotonic() > saved_at + SAVE_INTERVAL_S:
                save_results(results, plan)
                saved_at = time.monotonic()
            activity.count_episode(trajectory.success)

        try:
            return play_episodes(
                policy,
                pool,
                list(episode_keys),
                evaluation_behaviour(results.settings["mode"], results.settings["temperature"] or 1.0),
                evaluation_randomness(config.seed),
                max_batch=config.model.max_batch,
                film=lambda episode: config.video != "none",
                on_finished=keep,
            )
        finally:
            save_results(results, plan)


def choose_num_envs(simulator: SimulatorConfig, spec: EnvSpec, policy: Policy, num_episodes: int) -> int:
    """The number of --num-envs. `auto` is replaced by as many as are of use, and printed with the reason."""
    from experiment.machine_checks import find_renderer_apart
    from experiment.simulators import Limit, count_simulators

    if simulator.num_envs != "auto":
        return simulator.num_envs
    episodes = Limit(num_episodes, f"{num_episodes} episode(s)")
    count = count_simulators(simulator, len(spec.task_ids), policy.device, find_renderer_apart(), episodes)
    say(f"{spec.task_suite}: {count.reason}")
    return count.num_envs


def env_spec(config: EvalConfig, suite: str, num_images: int = 1) -> EnvSpec:
    """The recipe from which the simulators of a suite are built. Raises BadInput for a task that does not exist."""
    from experiment.setup import make_spec

    if config.simulator.bddl_file:
        task_ids: tuple[int, ...] = (0,)
    else:
        task_ids = config.task_ids or tuple(range(len(task_names(suite))))
    spec = make_spec(suite, task_ids, config.simulator, num_images)
    return replace(spec, leaked_prompt=config.prompt == "leaked")


if __name__ == "__main__":
    sys.exit(main_guard("eval.py", main))
