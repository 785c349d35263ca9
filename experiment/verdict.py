"""What the evaluations of a run say: success before and after training, and whether the policy has become better."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from configs.sections import ModelConfig, SimulatorConfig
from envs.tasks import PLUS_CHANGES, split_suite
from experiment.episodes import EpisodeKey, EpisodeResult, rates_by_rule
from experiment.results import read_results
from experiment.statistics import Paired, Successes, compare
from experiment.stored_run import StoredRun, evaluation_path


@dataclass(frozen=True)
class Evaluation:
    """The episodes of one evaluation in a run."""

    env_steps: int
    episodes: Sequence[EpisodeResult]

    @property
    def rates(self) -> dict[str, Successes]:
        """By the name of the rule."""
        return rates_by_rule(self.episodes)

    def outcomes(self, rule: str, task_id: int | None = None) -> dict[EpisodeKey, bool]:
        """Success of each episode that was played by this rule, of one task or of all."""
        return {
            result.key: result.success
            for result in self.episodes
            if result.rule.name == rule and task_id in (None, result.task_id)
        }


class Verdict(NamedTuple):
    kind: Literal["better", "worse", "within chance", "open"]
    lines: Sequence[str]


def read_evaluations(run: StoredRun) -> list[Evaluation]:
    """The evaluations of a run whose file is there, oldest first. Raises BadInput if a file is damaged."""
    evaluations = []
    for env_steps in run.evaluated_steps:
        path = evaluation_path(run.folder, env_steps)
        if path.exists():
            evaluations.append(Evaluation(env_steps, read_results(path).episodes))
    return evaluations


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluation that chose checkpoints/best: with the highest greedy success; the first one of equals."""
    return max(evaluations, key=lambda evaluation: evaluation.rates["greedy"].rate)


def changes(
    run: StoredRun, evaluations: Sequence[Evaluation], task_id: int | None = None
) -> dict[str, Paired]:
    """The changes from the policy that the run was given to the last student, sampled and greedy; of one task or all.

    By the name of the rule, or of the rule before and the one after: the greedy student is compared with its teacher if
    that is an L1 head, because the token head beside it was not trained before. Empty without two evaluations.
    """
    if len(evaluations) < 2:
        return {}
    first = evaluations[0]
    last = evaluations[-1]
    pairs = {
        "sampled": compare(first.outcomes("sampled", task_id), last.outcomes("sampled", task_id)),
        "greedy": compare(first.outcomes("greedy", task_id), last.outcomes("greedy", task_id)),
    }
    if any(result.mode == "l1" for result in first.episodes):
        teacher = first.outcomes("teacher", task_id)
        pairs["L1 head to greedy"] = compare(teacher, last.outcomes("greedy", task_id))
        del pairs["greedy"]
    return {rule: paired for rule, paired in pairs.items() if paired.n > 0}


def judge(run: StoredRun, evaluations: Sequence[Evaluation]) -> Verdict:
    """Compare the student of the last evaluation with the policy that the run was given, by each of its rates."""
    if not evaluations:
        return Verdict("open", ["nothing has been evaluated yet"])
    by_rule = changes(run, evaluations)
    if not by_rule:
        rates = [f"{rule} {rate}" for rule, rate in evaluations[0].rates.items()]
        return Verdict("open", ["the start, no later evaluation yet", *rates])
    lines = [
        f"{rule} {pairs.before} -> {pairs.after}: {pairs.kind}, {pairs}" for rule, pairs in by_rule.items()
    ]
    kinds = [pairs.kind for pairs in by_rule.values()]
    if "worse" in kinds:
        lines.append(f"the best evaluation is that of env step {best_evaluation(evaluations).env_steps:,}")
        return Verdict("worse", lines)
    if "better" in kinds:
        return Verdict("better", lines)
    if run.is_finished:
        _, change = split_suite(run.config.task.task_suite)
        has_more_states = change not in PLUS_CHANGES
        more = f", or evaluate more states: {command_for_more_states(run)}" if has_more_states else ""
        lines.append(f"train longer{more}")
    return Verdict("within chance", lines)


def command_for_more_states(run: StoredRun) -> str:
    """The command that compares the start and the end of a run in 200 states, played as the run plays them."""
    config = run.config
    task = config.task
    words = ["--checkpoint", f"{run.folder}/checkpoints/latest"]
    words += ["--compare-with", str(config.model.checkpoint), "--task-suite", task.task_suite]
    if config.simulator.bddl_file is None:
        words += ["--task-ids", *map(str, task.task_ids)]
    are_official_held_out = config.simulator.bddl_file is None and task.train_init_states == "fresh"
    words += ["--init-states", "both" if are_official_held_out else "fresh", "--trials", "200"]
    words += ["--mode", "greedy", "sample", "--temperature", str(config.rollout.temperature)]
    # Not --l1-student: beside an L1 head the start acts by that head, whatever the student learned.
    model = replace(config.model, checkpoint=None, l1_student=ModelConfig.l1_student)
    words += changed_flags(model) + changed_flags(config.simulator)
    return shlex.join(["python", "eval.py", *words])


def changed_flags(section: ModelConfig | SimulatorConfig) -> list[str]:
    """The flags, each followed by its value, of the settings that differ from their defaults."""
    defaults = vars(type(section)())
    changed = {name: value for name, value in vars(section).items() if value != defaults[name]}
    return [word for name, value in changed.items() for word in (f"--{name}".replace("_", "-"), str(value))]
