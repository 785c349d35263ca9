"""The choice of how the frozen teacher decides, and of the warmup that suits it where flags say `auto`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from configs.config import TrainConfig, changed
from configs.sections import PhaseConfig
from contracts import BadInput

TeacherMode = Literal["greedy", "median", "l1"]

# What `auto` means in the warmup; the help in configs/sections.py repeats these numbers. Beside an L1 head the token
# head was never trained on actions: it needs many steps, and where the student acts it also learns what to do after its
# own mistakes.
L1_WARMUP_STEPS = 50_000
L1_WARMUP_EPOCHS = 16
L1_WARMUP_LR = 1e-3
# Beside a token head the student begins as its teacher and has only to sample more surely. One rollout of some 500
# decisions makes about 32 optimizer steps. docs/LOG.md compares learning rates and epochs.
GREEDY_WARMUP_STEPS = 4_000
GREEDY_WARMUP_EPOCHS = 4
GREEDY_WARMUP_LR = 1e-4


class TeacherChoice(NamedTuple):
    """How the teacher decides, and the reason in words."""

    mode: TeacherMode
    why: str


def settle_warmup(config: TrainConfig, mode: TeacherMode, is_laplace: bool = False) -> TrainConfig:
    """Replace `auto` in the settings of the warmup by numbers that suit the teacher.

    is_laplace: whether the student's tokens are drawn around an L1 head's actions. It then equals that teacher from the
    start, and there is neither warmup nor transition.
    """
    if is_laplace:
        config = changed(config, warmup=False)
    is_l1 = mode == "l1"
    automatic = {
        "warmup_actor": "student" if is_l1 else "teacher",
        "warmup_target": "soft" if mode == "greedy" else "hard",
        "warmup_steps": L1_WARMUP_STEPS if is_l1 else GREEDY_WARMUP_STEPS,
        "warmup_epochs": L1_WARMUP_EPOCHS if is_l1 else GREEDY_WARMUP_EPOCHS,
        "warmup_lr": L1_WARMUP_LR if is_l1 else GREEDY_WARMUP_LR,
    }
    settings = {**vars(config.phases), **vars(config.update)}
    return changed(config, **{name: value for name, value in automatic.items() if settings[name] == "auto"})


def choose_teacher(
    phases: PhaseConfig, checkpoint: str, kl_coef: float, can_act_by_l1: bool, is_laplace: bool = False
) -> TeacherChoice:
    """Choose how the teacher decides: greedily by its token logits, or by its L1 head.

    checkpoint: the name of the one that is trained. can_act_by_l1, is_laplace: of the teacher, see `vla.policy.Policy`.
    Raises BadInput when the flags ask for what it cannot do.
    """
    if phases.teacher == "l1" and not can_act_by_l1:
        raise BadInput(f"--teacher l1: {checkpoint} cannot act by an L1 head; use --teacher greedy")
    if phases.teacher != "auto":
        choice = TeacherChoice(phases.teacher, "as asked by --teacher")
    elif is_laplace:
        choice = TeacherChoice("greedy", "its likeliest tokens are those of its L1 head's actions")
    elif can_act_by_l1:
        choice = TeacherChoice(
            "l1", "the checkpoint was trained by regression: its token logits mean nothing"
        )
    else:
        choice = TeacherChoice(
            "greedy", "the checkpoint cannot act by an L1 head, so its likeliest tokens are the teacher's"
        )
    learns_distribution = phases.warmup and phases.warmup_target == "soft"
    if choice.mode == "l1" and (kl_coef > 0 or learns_distribution):
        remedy = "leave out --teacher l1" if is_laplace else "leave them out, or use --warmup-target hard"
        raise BadInput(
            "--kl-coef and --warmup-target soft need the teacher's token distribution, and the L1 head has none: "
            + remedy
        )
    return choice
