"""Which phase a run is in, which depends on its env steps alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from configs.config import TrainConfig
from configs.sections import PhaseConfig


class Phase(Enum):
    """The phases in their order, by which the metric `schedule/phase` numbers them from 0."""

    # The student learns the teacher's tokens; the teacher acts, or the student (--warmup-actor).
    WARMUP = "warmup"
    # The teacher makes each decision with probability epsilon; PPO on all decisions.
    TRANSITION = "transition"
    RL = "RL"  # the student acts; PPO


@dataclass(frozen=True)
class PhaseState:
    """A phase, and who acts in it."""

    phase: Phase
    # Probability that the teacher makes a rollout's first decision: 1 in the warmup (0 with --warmup-actor student), 0
    # in RL. In the transition it falls with every env step of the rollout.
    epsilon_start: float
    epsilon_fall: float = 0.0  # with each env step
    # In the warmup with --warmup-actor student: the student learns what the teacher would have done.
    needs_teacher_labels: bool = False

    @property
    def distils(self) -> bool:
        """Whether the student learns to imitate tokens; otherwise it learns from returns."""
        return self.phase is Phase.WARMUP


def phase_at(global_step: int, phases: PhaseConfig) -> PhaseState:
    """The phase of a rollout that begins at `global_step`. Epsilon falls linearly from 1 to 0 over the transition."""
    warmup_end = end_of_warmup(phases)
    transition_steps = phases.transition_steps if phases.warmup else 0
    if global_step < warmup_end:
        assert phases.warmup_actor != "auto"  # `settle_warmup` has replaced it
        if phases.warmup_actor == "student":
            return PhaseState(Phase.WARMUP, epsilon_start=0.0, needs_teacher_labels=True)
        return PhaseState(Phase.WARMUP, epsilon_start=1.0)
    if global_step < warmup_end + transition_steps:
        share_done = (global_step - warmup_end) / transition_steps
        return PhaseState(Phase.TRANSITION, 1.0 - share_done, epsilon_fall=1.0 / transition_steps)
    return PhaseState(Phase.RL, epsilon_start=0.0)


def rollout_steps(global_step: int, config: TrainConfig) -> int:
    """The env steps of the rollout that begins at `global_step`: --n-steps, and in the warmup at most that.

    The warmup's env steps are divided equally among its rollouts. If each played --n-steps, the last one could run far
    into the transition, with the teacher alone.
    """
    n_steps = config.rollout.n_steps
    steps_left = end_of_warmup(config.phases) - global_step
    if steps_left <= 0:
        return n_steps
    return math.ceil(steps_left / math.ceil(steps_left / n_steps))


def end_of_warmup(phases: PhaseConfig) -> int:
    """The env steps after which the warmup is over; 0 without one."""
    return int(phases.warmup_steps) if phases.warmup else 0
