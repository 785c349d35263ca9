"""Which phase a run is in: a pure function of env steps (SPEC section 3)."""

from dataclasses import dataclass
from enum import Enum

from configs.config import PhaseConfig


class Phase(Enum):
    WARMUP = "warmup"  # the teacher acts, the student learns its tokens
    TRANSITION = "transition"  # the teacher acts with probability epsilon, PPO on the mixed experience
    RL = "rl"  # the student acts, PPO


@dataclass(frozen=True)
class PhaseState:
    phase: Phase
    epsilon: float  # probability that the teacher decides: 1 in the warmup, 0 in RL
    warmup_progress: float  # 0..1
    transition_progress: float  # 0..1


def phase_at(global_step: int, phases: PhaseConfig) -> PhaseState:
    """The phase at `global_step` env steps. Epsilon falls linearly from 1 to 0 over the transition.

    >>> phase_at(27_500, PhaseConfig()).epsilon
    0.5
    """
    warmup, transition = phase_lengths(phases)
    warmup_progress = min(1.0, global_step / warmup) if warmup else 1.0
    if global_step < warmup:
        return PhaseState(Phase.WARMUP, 1.0, warmup_progress, 0.0)
    into_transition = global_step - warmup
    if into_transition < transition:
        progress = into_transition / transition
        return PhaseState(Phase.TRANSITION, 1.0 - progress, 1.0, progress)
    return PhaseState(Phase.RL, 0.0, 1.0, 1.0)


def phase_lengths(phases: PhaseConfig) -> tuple[int, int]:
    """Env steps of the warmup and of the transition; both are 0 with --no-warmup."""
    return (phases.warmup_steps, phases.transition_steps) if phases.warmup else (0, 0)


def last_step(phases: PhaseConfig) -> int:
    """Env step at which the run ends."""
    return min(phases.total_steps, phases.warmup_steps) if phases.warmup_only else phases.total_steps
