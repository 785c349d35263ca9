"""The behaviour policy: who makes each decision of a rollout, the teacher or the student, and what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from configs.config import TrainConfig
from contracts import Observation
from envs.env import Physics
from rl.phases import PhaseState
from rl.teacher_choice import TeacherMode
from rl.trajectory import Decision, Episode
from vla.load_options import Mode
from vla.tokens import token_logprobs

if TYPE_CHECKING:
    from vla.policy import Acted, Policy


@dataclass(frozen=True)
class Behaviour:
    """Who makes the decisions of a rollout, and what is recorded about them."""

    epsilon_start: float  # probability that the teacher makes the rollout's first decision
    temperature: float  # the student's sampling temperature
    teacher_mode: TeacherMode = "greedy"
    student_mode: Mode = "sample"
    record_student_logprobs: bool = False  # PPO needs them for every decision, also for the teacher's
    physics: Physics = "exact"  # the simulators' mode; evaluations always use exact
    keep_observations: bool = True  # an evaluation of hundreds of episodes would fill the memory with images
    epsilon_fall: float = 0.0  # by which epsilon falls with each env step
    episode_length: float = 0.0  # expected env steps of an episode

    def epsilon_at(self, episode: Episode, env_steps: int) -> float:
        """Epsilon of a decision after `env_steps` env steps of an episode.

        The episodes before it in the rollout count with the expected length, not with what they have played so far.
        So epsilon depends on the place of a decision, and not on the speed of the simulators.
        """
        steps_before = episode.index * self.episode_length + env_steps
        return max(0.0, self.epsilon_start - self.epsilon_fall * steps_before)


def behaviour_in(
    phase: PhaseState, config: TrainConfig, teacher_mode: TeacherMode, episode_length: float
) -> Behaviour:
    """The behaviour in the rollouts of a phase: the teacher, a mixture by epsilon, or the student acts."""
    return Behaviour(
        epsilon_start=phase.epsilon_start,
        epsilon_fall=phase.epsilon_fall,
        episode_length=episode_length,
        temperature=config.rollout.temperature,
        teacher_mode=teacher_mode,
        record_student_logprobs=not phase.distils,
        physics=config.rollout.physics,
    )


def decide(
    policy: Policy,
    observations: Sequence[Observation],
    generators: Sequence[torch.Generator],
    epsilons: Sequence[float],
    behaviour: Behaviour,
) -> tuple[list[Decision], np.ndarray]:
    """Make one decision for each observation. Returns the decisions, and env-ready actions (B, chunk, action_dim).

    epsilons: for each observation, the probability that the teacher decides. Each observation has its own generator. It
    draws first who decides (only if 0 < epsilon < 1), and then the student's tokens. So the decision for an observation
    does not depend on the rest of the batch.
    """
    teacher_decides = [
        _teacher_decides(generator, epsilon) for generator, epsilon in zip(generators, epsilons, strict=True)
    ]
    decided: dict[int, tuple[Decision, np.ndarray]] = {}  # by row of `observations`
    for by_teacher in (True, False):
        rows = [row for row, is_teacher in enumerate(teacher_decides) if is_teacher == by_teacher]
        if not rows:
            continue
        seen = [observations[row] for row in rows]
        if by_teacher:
            acted = policy.act_as_teacher(seen, behaviour.teacher_mode)
            logprobs = student_logprobs(policy, seen, acted, behaviour)
        else:
            streams = [generators[row] for row in rows]
            acted = policy.act(seen, behaviour.student_mode, behaviour.temperature, streams)
            logprobs = list(acted.logprobs)
        for i, row in enumerate(rows):
            decision = Decision(seen[i], acted.tokens[i], by_teacher, logprobs[i], acted.kept[i])
            decided[row] = (decision, acted.actions[i])
    in_order = [decided[row] for row in range(len(observations))]
    return [decision for decision, _ in in_order], np.stack([actions for _, actions in in_order])


@torch.no_grad()
def student_logprobs(
    policy: Policy, observations: Sequence[Observation], acted: Acted, behaviour: Behaviour
) -> Sequence[torch.Tensor | None]:
    """The student's log-probs (A,) of the tokens that the teacher chose: the denominators of PPO's ratios.

    None where they are not recorded.

    PPO's ratio is that of the new student to the old one for the teacher's tokens, too. So it is 1 at first, and the
    clip bounds by how much one update changes the student. Were the denominator the teacher's probability of its
    token, which is 1, the ratio would be as small as the student's probability of it, and so the gradient of what the
    student has yet to learn. The price is a gradient that is biased towards the teacher, on purpose.
    """
    if not behaviour.record_student_logprobs:
        return [None] * len(observations)
    logits = policy.chunk_logits(observations, acted.kept)
    return list(token_logprobs(logits, acted.tokens.to(logits.device), behaviour.temperature).cpu())


def _teacher_decides(generator: torch.Generator, epsilon: float) -> bool:
    """Draw whether the teacher makes a decision, with probability `epsilon`."""
    if 0 < epsilon < 1:
        return torch.rand((), generator=generator).item() < epsilon
    return epsilon == 1  # no draw is needed
