"""The behaviour policy: who makes each decision of a rollout, the teacher or the student, and what is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from configs.config import TrainConfig
from contracts import Observation
from envs.env import Physics
from rl.phases import PhaseState, TeacherMode
from rl.trajectory import Decision

if TYPE_CHECKING:
    from vla.policy import Policy


@dataclass(frozen=True)
class Behaviour:
    """Who makes the decisions of a rollout, and what is recorded about them."""

    epsilon: float  # probability that the teacher makes a decision
    temperature: float  # the student's sampling temperature
    teacher_mode: TeacherMode = "greedy"
    student_mode: Literal["sample", "greedy"] = "sample"
    record_student_logprobs: bool = False  # PPO needs them for every decision, also for the teacher's
    physics: Physics = "exact"  # the simulators' mode; evaluations always use exact
    keep_observations: bool = True  # an evaluation of hundreds of episodes would fill the memory with images


def behaviour_in(phase: PhaseState, config: TrainConfig, teacher_mode: TeacherMode) -> Behaviour:
    """The behaviour in the rollouts of a phase: the teacher, a mixture by epsilon, or the student acts."""
    return Behaviour(
        epsilon=phase.epsilon,
        temperature=config.rollout.temperature,
        teacher_mode=teacher_mode,
        record_student_logprobs=not phase.distils,
        physics=config.rollout.physics,
    )


def decide(
    policy: Policy,
    observations: Sequence[Observation],
    generators: Sequence[torch.Generator],
    behaviour: Behaviour,
) -> tuple[list[Decision], np.ndarray]:
    """Make one decision for each observation. Returns the decisions, and env-ready actions (B, chunk, action_dim).

    Each observation has its own generator. It draws first who decides (only if 0 < epsilon < 1), and then the student's
    tokens. So the decision for an observation does not depend on the rest of the batch.
    """
    teacher_decides = [_teacher_decides(generator, behaviour.epsilon) for generator in generators]
    teacher_rows = [row for row, by_teacher in enumerate(teacher_decides) if by_teacher]
    student_rows = [row for row, by_teacher in enumerate(teacher_decides) if not by_teacher]
    decisions: dict[int, Decision] = {}  # by row of `observations`
    actions: dict[int, np.ndarray] = {}

    if teacher_rows:
        acted = policy.act_as_teacher([observations[row] for row in teacher_rows], behaviour.teacher_mode)
        for i, row in enumerate(teacher_rows):
            decisions[row] = Decision(observations[row], acted.tokens[i], by_teacher=True)
            actions[row] = acted.actions[i]
        if behaviour.record_student_logprobs:
            record_student_logprobs(policy, [decisions[row] for row in teacher_rows], behaviour.temperature)

    if student_rows:
        acted = policy.act(
            [observations[row] for row in student_rows],
            behaviour.student_mode,
            behaviour.temperature,
            [generators[row] for row in student_rows],
        )
        for i, row in enumerate(student_rows):
            logprobs = acted.logprobs[i]
            decisions[row] = Decision(
                observations[row], acted.tokens[i], by_teacher=False, student_logprobs=logprobs
            )
            actions[row] = acted.actions[i]

    rows = range(len(observations))
    return [decisions[row] for row in rows], np.stack([actions[row] for row in rows])


def _teacher_decides(generator: torch.Generator, epsilon: float) -> bool:
    """Draw whether the teacher makes a decision, with probability `epsilon`."""
    if 0 < epsilon < 1:
        return torch.rand((), generator=generator).item() < epsilon
    return epsilon == 1  # no draw is needed


@torch.no_grad()
def record_student_logprobs(policy: Policy, decisions: Sequence[Decision], temperature: float) -> None:
    """Fill in the student's log-probs (A,) of the tokens that the teacher chose: the denominator of PPO's ratio."""
    observations = [decision.observation for decision in decisions if decision.observation is not None]
    logits = policy.chunk_logits(observations)
    tokens = torch.stack([decision.tokens for decision in decisions]).to(logits.device)
    logprobs = policy.token_logprobs(logits, tokens, temperature).cpu()
    for decision, row in zip(decisions, logprobs, strict=True):
        decision.student_logprobs = row
