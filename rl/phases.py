"""Which phase a run is in, a pure function of env steps, and how the frozen teacher decides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from configs.config import PhaseConfig, TrainConfig
from contracts import BadInput

TeacherMode = Literal["greedy", "l1"]


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
    global_step: int

    @property
    def distils(self) -> bool:
        return self.phase is Phase.WARMUP


class Teacher(NamedTuple):
    mode: TeacherMode
    why: str


def phase_at(global_step: int, phases: PhaseConfig) -> PhaseState:
    """The phase at `global_step` env steps. Epsilon falls linearly from 1 to 0 over the transition."""
    warmup, transition = phase_lengths(phases)
    if global_step < warmup:
        return PhaseState(Phase.WARMUP, 1.0, global_step / warmup, 0.0, global_step)
    if global_step < warmup + transition:
        progress = (global_step - warmup) / transition
        return PhaseState(Phase.TRANSITION, 1.0 - progress, 1.0, progress, global_step)
    return PhaseState(Phase.RL, 0.0, 1.0, 1.0, global_step)


def phase_lengths(phases: PhaseConfig) -> tuple[int, int]:
    """Env steps of the warmup and of the transition; both are 0 with --no-warmup."""
    return (phases.warmup_steps, phases.transition_steps) if phases.warmup else (0, 0)


def choose_teacher(config: TrainConfig, has_l1_head: bool) -> Teacher:
    """How the teacher decides, and why in words. Raises BadInput."""
    wanted, checkpoint = config.phases.teacher, config.model.checkpoint
    if wanted == "l1" and not has_l1_head:
        raise BadInput(f"--teacher l1: {checkpoint} ships no action head; use --teacher greedy")
    teacher = Teacher("greedy", "the checkpoint has no action head: its token logits were trained")
    if wanted != "auto":
        teacher = Teacher(wanted, "as asked by --teacher")
    elif has_l1_head:
        teacher = Teacher("l1", "the checkpoint was trained by regression: its token logits mean nothing")
    if teacher.mode == "l1" and (config.phases.distill_target == "sharpened" or config.loss.kl_coef > 0):
        raise BadInput(
            "--distill-target sharpened and --kl-coef need the teacher's token distribution, and the L1 head has none; "
            "leave them out or use --teacher greedy"
        )
    return teacher
