"""Which phase a run is in, which depends on its env steps alone, and how the frozen teacher decides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from configs.config import TrainConfig, changed
from configs.sections import PhaseConfig
from contracts import BadInput

TeacherMode = Literal["greedy", "median", "l1"]


# What `auto` means in the warmup. Beside an L1 head the token head was never trained on actions: it needs many steps,
# and where the student acts it also learns what to do after its own mistakes (docs/RESULTS.md, "An L1 checkpoint").
L1_WARMUP_STEPS = 50_000
L1_WARMUP_EPOCHS = 16
L1_WARMUP_LR = 1e-3
# The tokens of a policy's own greedy decisions teach it little. Large steps on one rollout change its greedy decisions
# in states that were not in it: at full size one pass at 3e-5 cost more than half of the success (docs/LOG.md, "Starts
# at which the three phases matter").
GREEDY_WARMUP_STEPS = 4_000
GREEDY_WARMUP_EPOCHS = 1
GREEDY_WARMUP_LR = 3e-6


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
    epsilon: float
    epsilon_fall: float = 0.0  # with each env step

    @property
    def distils(self) -> bool:
        """Whether the student learns to imitate tokens; otherwise it learns from returns."""
        return self.phase is Phase.WARMUP

    @property
    def needs_teacher_labels(self) -> bool:
        """Whether the student acts, and learns what the teacher would have done."""
        return self.distils and self.epsilon == 0


class TeacherChoice(NamedTuple):
    """How the teacher decides, and the reason in words."""

    mode: TeacherMode
    why: str


def phase_at(global_step: int, phases: PhaseConfig) -> PhaseState:
    """The phase of a rollout that begins at `global_step`. Epsilon falls linearly from 1 to 0 over the transition."""
    warmup_end = end_of_warmup(phases)
    transition_steps = phases.transition_steps if phases.warmup else 0
    if global_step < warmup_end:
        epsilon = 0.0 if phases.warmup_actor == "student" else 1.0
        return PhaseState(Phase.WARMUP, epsilon)
    if global_step < warmup_end + transition_steps:
        share_done = (global_step - warmup_end) / transition_steps
        return PhaseState(Phase.TRANSITION, epsilon=1.0 - share_done, epsilon_fall=1.0 / transition_steps)
    return PhaseState(Phase.RL, epsilon=0.0)


def settle_warmup(config: TrainConfig, mode: TeacherMode) -> TrainConfig:
    """Replace `auto` in the settings of the warmup by numbers that suit the teacher."""
    is_l1 = mode == "l1"
    automatic = {
        "warmup_actor": "student" if is_l1 else "teacher",
        "warmup_steps": L1_WARMUP_STEPS if is_l1 else GREEDY_WARMUP_STEPS,
        "warmup_epochs": L1_WARMUP_EPOCHS if is_l1 else GREEDY_WARMUP_EPOCHS,
        "warmup_lr": L1_WARMUP_LR if is_l1 else GREEDY_WARMUP_LR,
    }
    settings = {**vars(config.phases), **vars(config.update)}
    return changed(config, **{name: value for name, value in automatic.items() if settings[name] == "auto"})


def rollout_steps(global_step: int, config: TrainConfig) -> int:
    """The env steps of the rollout that begins at `global_step`: --n-steps, but in the warmup at most that.

    The rollouts of the warmup share its env steps equally. Otherwise the last one could play most of the transition's.
    """
    n_steps = config.rollout.n_steps
    steps_left = end_of_warmup(config.phases) - global_step
    if steps_left <= 0:
        return n_steps
    return math.ceil(steps_left / math.ceil(steps_left / n_steps))


def end_of_warmup(phases: PhaseConfig) -> int:
    """The env steps after which the warmup is over; 0 without one."""
    return int(phases.warmup_steps) if phases.warmup else 0


def choose_teacher(phases: PhaseConfig, checkpoint: str, kl_coef: float, has_l1_head: bool) -> TeacherChoice:
    """Choose how the teacher decides: greedily by its token logits, or by its L1 head.

    checkpoint: the name of the one that is trained. has_l1_head: whether the teacher's checkpoint has one. Raises
    BadInput when the flags ask for what it cannot do.
    """
    mode, why = _mode_and_reason(phases, checkpoint, has_l1_head)
    if kl_coef > 0 and mode == "l1":
        raise BadInput(
            "--kl-coef needs the teacher's token distribution, and the L1 head has none; leave it out or use --teacher "
            "greedy"
        )
    return TeacherChoice(mode, why)


def _mode_and_reason(phases: PhaseConfig, checkpoint: str, has_l1_head: bool) -> tuple[TeacherMode, str]:
    if phases.teacher == "greedy":
        return "greedy", "as asked by --teacher"
    if phases.teacher == "median":
        return "median", "as asked by --teacher"
    if phases.teacher == "l1":
        if not has_l1_head:
            raise BadInput(f"--teacher l1: {checkpoint} has no action head; use --teacher greedy")
        return "l1", "as asked by --teacher"
    name = phases.teacher_checkpoint or "the checkpoint"
    if has_l1_head:
        return "l1", f"{name} was trained by regression: its token logits mean nothing"
    return "greedy", f"{name} has no action head, so its likeliest tokens are the teacher's"
