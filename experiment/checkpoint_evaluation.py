"""Evaluate a checkpoint as the settings of eval.py say, or two checkpoints on the same episodes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.eval_config import EvalConfig
from contracts import BadInput, resolve_pointer
from envs.env import EnvSpec, TaskInfo
from envs.pool import Pool, make_pool, task_info
from envs.tasks import split_suite, task_names
from experiment.episodes import EpisodeKey, Rule
from experiment.evaluator import Conditions, play_each
from experiment.file_lock import locked
from experiment.interrupts import interruptible
from experiment.policies import choose_looks, load_policy
from experiment.provenance import provenance
from experiment.results import (
    Results,
    ResultsFile,
    check_comparable,
    open_results,
    read_results,
    settings_of,
)
from experiment.setup import make_spec
from experiment.simulators import Limit, count_simulators, find_renderer_apart
from experiment.terminal import say
from rl.selfcheck import attention_probe, image_probe, made_up_observation
from vla.adapter_folder import base_and_adapter
from vla.dataset_statistics import select_key
from vla.hub import commit_of
from vla.policy import Mode, Policy


@dataclass(frozen=True)
class Plan:
    """The episodes that a command plays."""

    tasks: Mapping[str, Sequence[TaskInfo]]  # by suite
    keys: Sequence[EpisodeKey]
    provenance: Mapping[str, object]

    def missing(self, suite: str, rules: Sequence[Rule], results: Results) -> dict[Rule, list[EpisodeKey]]:
        """The episodes of a suite that were not played yet, by rule; no rules of which all were played."""
        missing = {}
        for rule in rules:
            played = results.outcomes(rule)
            keys = [key for key in self.keys if key.task_suite == suite and key not in played]
            if keys:
                missing[rule] = keys
        return missing


def settle(config: EvalConfig) -> EvalConfig:
    """Replace `auto` by the assets, and a pointer such as `best` by the checkpoint that it names now."""
    checkpoint = str(resolve_pointer(Path(str(config.model.checkpoint))))
    model = replace(config.model, checkpoint=checkpoint)
    assets = choose_looks(config.simulator.assets, model)
    # A simulator stays with its task until no episode of it is left, so earlier tasks need not be kept.
    return replace(config, model=model, simulator=replace(config.simulator, assets=assets, kept_tasks=1))


def make_plan(config: EvalConfig, argv: Sequence[str]) -> Plan:
    """Plan the episodes. Raises BadInput for tasks or initial states that do not exist."""
    tasks = {suite: task_info(env_spec(config, suite)) for suite in config.suites}
    keys = [
        key
        for suite, suite_tasks in tasks.items()
        for task in suite_tasks
        for key in task_keys(config, suite, task)
    ]
    return Plan(tasks, keys, {"protocol": config.protocol, **provenance(argv)})


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


def play_planned(config: EvalConfig, plan: Plan) -> tuple[Results, Results | None]:
    """Play what the results file lacks. Returns the results and those of --compare-with.

    If that names a checkpoint, it plays the same episodes, and its results file is STEM-before.json.
    """
    out = Path(config.out or time.strftime(f"runs/eval-%Y%m%d-%H%M%S-{os.getpid()}.json"))
    with locked(out.with_name(f".{out.name}.lock"), f"--out {out}"):
        try:
            return play_all(config, plan, out)
        except KeyboardInterrupt:
            say(f"stopped; finished episodes are saved: to continue, run the same command with --out {out}")
            raise


def play_all(config: EvalConfig, plan: Plan, out: Path) -> tuple[Results, Results | None]:
    """Play the missing episodes of the checkpoint, and before it those of the one to compare with."""
    compare_with = config.compare_with
    if compare_with is None:
        return play(config, plan, out), None
    if compare_with.endswith(".json"):
        before = read_results(Path(compare_with))
        return play(config, plan, out, before), before
    model_before = replace(config.model, checkpoint=str(resolve_pointer(Path(compare_with))))
    open_evaluation(config, plan, out)  # what is wrong with it is found before the other one plays for hours
    before = play(replace(config, model=model_before), plan, out.with_name(f"{out.stem}-before.json"))
    return play(config, plan, out, before), before


def play(config: EvalConfig, plan: Plan, out: Path, before: Results | None = None) -> Results:
    """Play the planned episodes that the results file `out` lacks, suite by suite. Raises BadInput."""
    policy, file = open_evaluation(config, plan, out)
    if before is not None:
        check_comparable(file.results.settings, before.settings, str(config.compare_with))
    rules = choose_rules(config, policy)
    say(
        f"{config.model.checkpoint}: {policy.info.kind}; reads {policy.info.reads}; {', '.join(map(str, rules))}"
    )
    if file.results.episodes:
        say(f"{out}: {len(file.results.episodes)} episodes are there already")
    file.results.complete = False
    for suite in config.suites:
        missing = plan.missing(suite, rules, file.results)
        if missing and suite != config.suites[0]:
            # The action statistics differ between suites. The old policy's memory is freed first.
            del policy
            policy = load_policy(config.model, suite)
        if missing:
            play_suite(config, policy, missing, file)
    left_out = [
        key
        for suite in config.suites
        for keys in plan.missing(suite, rules, file.results).values()
        for key in keys
    ]
    for key in left_out:
        say(f"not played, because the simulator failed: {key}")
    file.results.complete = not left_out
    file.save()
    say(f"results: {out}")
    return file.results


def open_evaluation(config: EvalConfig, plan: Plan, out: Path) -> tuple[Policy, ResultsFile]:
    """Load the policy for the first suite and open its results file. Raises BadInput if it cannot be evaluated."""
    policy = load_policy(config.model, config.suites[0])
    choose_rules(config, policy)
    for suite in config.suites:
        base_suite, _ = split_suite(suite)
        select_key(policy.info.statistics_folder, policy.info.statistics, base_suite, config.model.unnorm_key)
    settings = settings_of(config.model, config.simulator, policy, config.seed, config.prompt)
    hub_commit = commit_of(policy.info.weights_folder)
    return policy, open_results(out, settings, {**plan.provenance, "hub_commit": hub_commit})


def choose_rules(config: EvalConfig, policy: Policy) -> list[Rule]:
    """The rules of --mode. Raises BadInput if one is the L1 head and the checkpoint has none."""
    checkpoint = str(config.model.checkpoint)
    can_act_by_l1 = policy.can_act_by_l1(checkpoint)
    modes: Sequence[Mode]
    if config.mode is not None:
        modes = config.mode
    elif config.samples:
        modes = ["sample"]
    else:
        modes = ["l1" if can_act_by_l1 else "greedy"]
    if "l1" in modes and not can_act_by_l1:
        advice = "use --mode greedy, median or sample"
        if policy.action_head is not None:
            base, _ = base_and_adapter(checkpoint)
            advice += f"; that of the untrained policy is evaluated by --checkpoint {base}"
        raise BadInput(f"--mode l1: {checkpoint} has no L1 action head; {advice}")
    temperature = config.temperature or 1.0
    return [Rule(mode, temperature if mode == "sample" else None) for mode in dict.fromkeys(modes)]


def play_suite(
    config: EvalConfig, policy: Policy, missing: Mapping[Rule, Sequence[EpisodeKey]], file: ResultsFile
) -> None:
    """Check the policy, and play the missing episodes of one suite."""
    keys = [key for rule_keys in missing.values() for key in rule_keys]
    spec = env_spec(config, keys[0].task_suite, policy.num_images)
    num_envs = choose_num_envs(config, spec, policy, max(map(len, missing.values())))
    prepare = policy.model_inputs.prepare_images
    with interruptible(), make_pool(spec, num_envs, prepare, config.simulator.simulators) as pool:
        pool.start_building(list(dict.fromkeys(key.task_id for key in keys)))
        check_policy(policy, task_info(spec)[0].instruction)
        file.save()
        pool.wait_until_built()
        play_missing(config, policy, pool, missing, file)


def play_missing(
    config: EvalConfig,
    policy: Policy,
    pool: Pool,
    missing: Mapping[Rule, Sequence[EpisodeKey]],
    file: ResultsFile,
) -> None:
    """Play the missing episodes of each rule, and save them also if this is stopped."""
    videos = file.path.with_name(f"{file.path.stem}-videos")
    conditions = Conditions(config.seed, config.model.max_batch, config.video, videos)
    try:
        for rule, keys in missing.items():
            for result in play_each(policy, pool, keys, rule, conditions):
                file.add(result)
    finally:
        file.save()


def check_policy(policy: Policy, instruction: str) -> None:
    """Check the policy for faults that raise no error by themselves."""
    observation = made_up_observation(policy, instruction)
    attention_probe(policy, observation)
    image_probe(policy, observation)


def choose_num_envs(config: EvalConfig, spec: EnvSpec, policy: Policy, num_episodes: int) -> int:
    """The number of --num-envs. `auto` is replaced by as many as are of use, and printed with the reason."""
    simulator = config.simulator
    if simulator.num_envs != "auto":
        return simulator.num_envs
    episodes = Limit(num_episodes, f"{num_episodes} episode(s)")
    count = count_simulators(simulator, len(spec.task_ids), policy.device, find_renderer_apart(), episodes)
    say(f"{spec.task_suite}: {count.reason}")
    return count.num_envs


def env_spec(config: EvalConfig, suite: str, num_images: int = 1) -> EnvSpec:
    """The recipe from which the simulators of a suite are built. Raises BadInput for a task that does not exist."""
    if config.simulator.bddl_file:
        task_ids: tuple[int, ...] = (0,)
    else:
        task_ids = config.task_ids or tuple(range(len(task_names(suite))))
    spec = make_spec(suite, task_ids, config.simulator, num_images)
    return replace(spec, leaked_prompt=config.prompt == "leaked")
