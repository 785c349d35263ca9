#!/usr/bin/env python
"""Measure the success rate of a checkpoint on LIBERO tasks.

    python eval.py --checkpoint runs/RUN/checkpoints/best --task-ids 0 --out results.json
    python eval.py --checkpoint runs/RUN/checkpoints/best --compare-with CHECKPOINT --task-ids 0
    python eval.py --checkpoint CHECKPOINT --task-ids 0 --mode greedy sample --init-states both --trials 200
    python eval.py --checkpoint CHECKPOINT --task-suite all --out results.json

The defaults are the published protocol: all tasks of a suite, a greedy episode from each of the 50 official initial
states. A command with --out continues an interrupted evaluation. docs/RESULTS_JSON.md describes the results file.
"""

import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from command_line import main_guard
from configs.cli import parse_eval
from envs.cache import choose_library_caches


def before_imports(argv: Sequence[str]) -> None:
    """Answer --help and wrong flags before the imports below, which take seconds."""
    parse_eval(argv)
    choose_library_caches()


if __name__ == "__main__":
    exit_code = main_guard("eval.py", before_imports)
    if exit_code != 0:
        sys.exit(exit_code)

from configs.eval_config import EvalConfig
from contracts import BadInput, locked, resolve_pointer
from envs.assets import find_pack
from envs.env import EnvSpec, TaskInfo
from envs.pool import Pool, make_pool, task_info
from envs.tasks import bddl_task, split_suite, task_names
from experiment.episodes import EpisodeKey, Rule
from experiment.evaluator import Conditions, play_each
from experiment.interrupts import interruptible
from experiment.policies import choose_looks, find_checkpoint, load_policy, model_before
from experiment.provenance import provenance
from experiment.results import (
    FREE_IN_COMPARISONS,
    Results,
    ResultsFile,
    Settings,
    open_results,
    read_results,
    refuse_differences,
    settings_of,
)
from experiment.results_table import comparison_table, results_table
from experiment.setup import make_spec
from experiment.simulators import count_simulators, find_renderer_apart
from experiment.stored_run import METRICS_FILE, read_run
from experiment.terminal import say
from preflight import looks_warning
from probes import attention_probe, image_probe, made_up_observation
from vla.adapter_folder import CONFIG_FILE as ADAPTER_FILE
from vla.adapter_folder import base_and_adapter
from vla.dataset_statistics import select_key
from vla.hub import commit_of
from vla.load_options import Mode
from vla.policy import Policy

Plan = Mapping[EpisodeKey, str]  # the episodes that a command plays, each with its instruction


def main(argv: Sequence[str]) -> None:
    """Play the missing episodes of one checkpoint, or of the two of a comparison, and print the results."""
    config = settle(parse_eval(argv))
    plan = plan_episodes(config)
    results, before = play(config, plan, argv)
    rules = [rule for rule in results.rules if config.mode is None or rule.mode in config.mode]
    print(*results_table(results, rules, plan), sep="\n")
    print_trained_states(config, plan)
    if before is not None:
        print(f"\nbefore: {before.settings.checkpoint}")
        print(*comparison_table(before, results, rules, plan), sep="\n")


def settle(config: EvalConfig) -> EvalConfig:
    """Replace `auto` by the assets, and a pointer such as `best` by the checkpoint that it names now."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    checkpoint = str(resolve_pointer(Path(str(config.model.checkpoint))))
    model = replace(config.model, checkpoint=checkpoint)
    assets = choose_looks(config.simulator.assets, model)
    return replace(config, model=model, simulator=replace(config.simulator, assets=assets))


def plan_episodes(config: EvalConfig) -> Plan:
    """The episodes to play. Raises BadInput for tasks or initial states that do not exist."""
    return {
        key: task.instruction
        for suite in config.suites
        for task in task_info(env_spec(config, suite))
        for key in task_keys(config, suite, task)
    }


def env_spec(config: EvalConfig, suite: str, num_images: int = 1) -> EnvSpec:
    """The recipe from which the simulators of a suite are built. Raises BadInput for a task that does not exist."""
    if config.simulator.bddl_file:
        task_ids: tuple[int, ...] = (0,)
    else:
        task_ids = config.task_ids or tuple(range(len(task_names(suite))))
    spec = make_spec(suite, task_ids, config.simulator, num_images)
    # A simulator stays with its task until no episode of it is left, so earlier tasks need not be kept.
    return replace(spec, leaked_prompt=config.prompt == "leaked", kept_tasks=1)


def task_keys(config: EvalConfig, suite: str, task: TaskInfo) -> list[EpisodeKey]:
    """The --trials episodes of a task: its official states, fresh ones, or first the official and then fresh ones."""
    first = config.first_init_state
    if config.init_states == "fresh":
        return [EpisodeKey(suite, task.task_id, True, first + trial) for trial in range(config.trials)]
    official = range(first, task.num_init_states)[: config.trials]
    if not official:
        raise BadInput(
            f"--first-init-state {first}: {suite} task {task.task_id} "
            f"has only {task.num_init_states} initial states, counted from 0"
        )
    keys = [EpisodeKey(suite, task.task_id, False, state) for state in official]
    if config.init_states == "both":
        keys += [EpisodeKey(suite, task.task_id, True, seed) for seed in range(config.trials - len(keys))]
    return keys


def play(config: EvalConfig, plan: Plan, argv: Sequence[str]) -> tuple[Results, Results | None]:
    """Play what the results file lacks. Returns the results and those of --compare-with.

    If that names a checkpoint, it plays the same episodes, and its results file is STEM-before.json.
    """
    show_pictures(config)
    out = Path(config.out or time.strftime(f"runs/eval-%Y%m%d-%H%M%S-{os.getpid()}.json"))
    compare_with = config.compare_with
    before = None
    with locked(out.with_name(f".{out.name}.lock"), f"--out {out}"), interruptible():
        try:
            if compare_with is not None and compare_with.endswith(".json"):
                before = read_results(Path(compare_with))
            elif compare_with is not None:
                model = model_before(config.model, str(resolve_pointer(Path(compare_with))))
                out_before = out.with_name(f"{out.stem}-before.json")
                before = play_checkpoint(replace(config, model=model), plan, argv, out_before)
            return play_checkpoint(config, plan, argv, out, before), before
        except KeyboardInterrupt:
            same_out = f"--out {shlex.quote(str(out))}"
            say(f"stopped; finished episodes are saved: to continue, run the same command with {same_out}")
            raise


def show_pictures(config: EvalConfig) -> None:
    """Print the assets and the origin of initial states, with warnings about looks that the policy does not know."""
    pack = find_pack(config.simulator.assets)
    say(f"assets: {pack}")
    warning = looks_warning(find_checkpoint(config.model), pack)
    if warning is not None:
        say(warning)
    if config.simulator.bddl_file is not None:
        say(f"initial states: {bddl_task(config.simulator.bddl_file).init_states_source}")


def play_checkpoint(
    config: EvalConfig, plan: Plan, argv: Sequence[str], out: Path, before: Results | None = None
) -> Results:
    """Play the planned episodes that the results file `out` lacks, suite by suite. Raises BadInput.

    before: the results to compare with, which must have been played in the same way.
    """
    policy = load_policy(config.model, config.suites[0])
    rules = choose_rules(config, policy)
    for suite in config.suites:  # all have action statistics, which differ between suites
        base_suite, _ = split_suite(suite)
        select_key(policy.info.statistics_folder, policy.info.statistics, base_suite, policy.fixed_unnorm_key)
    settings = settings_of(config.model, config.simulator, policy, config.seed, config.prompt)
    if before is not None:
        check_comparison(f"--compare-with {config.compare_with}", before, settings, plan, rules)
    origin = {"hub_commit": commit_of(policy.info.weights_folder), **provenance(argv)}
    file = open_results(out, settings, origin)
    rule_names = ", ".join(map(str, rules))
    say(f"{config.model.checkpoint}: {policy.info.kind}; reads {policy.info.reads}; {rule_names}")
    if file.results.episodes:
        not_filmed = "" if config.video == "none" else "; to film them, play them again with another --out"
        say(f"{out}: {len(file.results.episodes)} episodes are there already{not_filmed}")
    for suite in config.suites:
        missing = missing_episodes(plan, suite, rules, file.results)
        if missing and suite != config.suites[0]:
            del policy  # its memory is needed
            policy = load_policy(config.model, suite)
        if missing:
            play_suite(config, suite, policy, missing, file)
    say(f"results: {out}")
    return file.results


def check_comparison(
    name: str, before: Results, settings: Settings, plan: Plan, rules: Sequence[Rule]
) -> None:
    """Raise BadInput if no episode can be paired with one of `before`, or they were played in another way.

    Says so if the two policies read different numbers of images.
    """
    refuse_differences(name, before.settings, settings, FREE_IN_COMPARISONS)
    if plan.keys().isdisjoint(result.key for result in before.episodes):
        raise BadInput(f"{name}: has none of these episodes: give its --task-ids and initial states")
    rules_before = before.rules
    # Every rule is compared with one that is there alone (`comparison_table`).
    if len(rules_before) > 1 and set(rules_before).isdisjoint(rules):
        raise BadInput(
            f"{name}: its episodes were played by other rules ({'; '.join(map(str, rules_before))}) than these "
            f"({'; '.join(map(str, rules))}): give its --mode and --temperature"
        )
    images_before = before.settings.num_images
    if images_before not in (None, settings.num_images):
        say(f"{name}: its policy reads {images_before} image(s), this one {settings.num_images}")


def choose_rules(config: EvalConfig, policy: Policy) -> list[Rule]:
    """The rules of --mode. Raises BadInput if one is the L1 head and the checkpoint has none."""
    checkpoint = str(config.model.checkpoint)
    base, adapter = base_and_adapter(checkpoint)
    # A run plays its student greedily, and its results are compared with those of its checkpoints.
    modes: Sequence[Mode] = config.mode or ["l1" if policy.can_act_by_l1 and adapter is None else "greedy"]
    if "l1" in modes and not policy.can_act_by_l1:
        advice = "use --mode greedy, median or sample"
        if policy.l1_head is not None:
            advice += f"; that of the untrained policy is evaluated by --checkpoint {base}"
        raise BadInput(f"--mode l1: {checkpoint} has no L1 head to act by; {advice}")
    temperature = config.temperature or 1.0
    return [Rule(mode, temperature if mode == "sample" else None) for mode in dict.fromkeys(modes)]


def missing_episodes(
    plan: Plan, suite: str, rules: Sequence[Rule], results: Results
) -> dict[Rule, list[EpisodeKey]]:
    """The episodes of a suite that were not played yet, by rule; no rules of which all were played."""
    missing = {}
    for rule in rules:
        played = results.outcomes(rule)
        keys = [key for key in plan if key.task_suite == suite and key not in played]
        if keys:
            missing[rule] = keys
    return missing


def play_suite(
    config: EvalConfig,
    suite: str,
    policy: Policy,
    missing: Mapping[Rule, Sequence[EpisodeKey]],
    file: ResultsFile,
) -> None:
    """Check the policy, and play the missing episodes of a suite by each rule."""
    spec = env_spec(config, suite, policy.num_images)
    num_episodes = max(map(len, missing.values()))
    renderer = find_renderer_apart(config.simulator.simulators)
    simulators = count_simulators(config.simulator, spec.kept_tasks, policy.device, renderer, num_episodes)
    say(f"{suite}: {simulators.reason}")
    prepare = policy.model_inputs.prepare_images
    with make_pool(spec, simulators.num_envs, prepare, config.simulator.simulators) as pool:
        observation = made_up_observation(policy, task_info(spec)[0].instruction)
        attention_probe(policy, observation)
        image_probe(policy, observation)
        play_missing(config, policy, pool, missing, file)


def play_missing(
    config: EvalConfig,
    policy: Policy,
    pool: Pool,
    missing: Mapping[Rule, Sequence[EpisodeKey]],
    file: ResultsFile,
) -> None:
    """Play the missing episodes of each rule, and save them also if this is stopped. Raises BadInput if none ends."""
    videos = file.path.with_name(f"{file.path.stem}-videos")
    conditions = Conditions(config.seed, config.model.max_batch, config.video, videos)
    try:
        for rule, keys in missing.items():
            for result in play_each(policy, pool, keys, rule, conditions):
                file.add(result)
    finally:
        file.save()
    for rule, keys in missing.items():
        for key in set(keys) - file.results.outcomes(rule).keys():
            say(f"not played, because the simulator failed three times: {key}, {rule}")
    if not file.results.episodes:
        raise BadInput("the simulator failed in every episode: see the messages above")


def print_trained_states(config: EvalConfig, plan: Plan) -> None:
    """Say so if the checkpoint's run, or one before it, has trained on states of the plan: these are not held out."""
    checkpoint = str(config.model.checkpoint)
    while (run := run_of(checkpoint)) is not None:
        try:
            settings = read_run(run).config
        except BadInput as problem:  # the run is of another version
            say(f"it is unknown whether {checkpoint} was trained on these states: {problem}")
            return
        task = settings.task
        states = task.train_init_states
        if states != "fresh" and any(
            not key.fresh and key.init_state_id in range(*states)
            for key in plan
            if key.task_suite == task.task_suite and key.task_id in task.task_ids
        ):
            say(
                f"{checkpoint} was trained on the official initial states {states} (first, end) of its tasks: for "
                "held-out success leave them out with --first-init-state and --trials"
            )
        checkpoint = str(settings.model.checkpoint)


def run_of(checkpoint: str) -> Path | None:
    """The folder of the run that wrote a checkpoint, if a run did. Such a checkpoint is an adapter."""
    folder = resolve_pointer(Path(checkpoint)).resolve()
    run = folder.parent.parent
    return run if (folder / ADAPTER_FILE).is_file() and (run / METRICS_FILE).is_file() else None


if __name__ == "__main__":
    sys.exit(main_guard("eval.py", main))
