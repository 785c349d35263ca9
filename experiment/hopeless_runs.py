"""Stop a run that cannot learn: its start never succeeds, or its student did not learn to imitate in the warmup."""

import logging

from configs.config import TrainConfig
from configs.sections import PhaseConfig
from contracts import BadInput
from experiment.checkpoints import TrainerState
from experiment.statistics import Rates
from rl.phases import end_of_warmup, phase_at

log = logging.getLogger(__name__)
NEARLY_ALL = 0.95  # from this success rate on there is little left to gain


def check_baseline(config: TrainConfig, rates: Rates) -> None:
    """Check the first evaluation: raise BadInput if the policy that training starts from had no success.

    That is the teacher, or without a warmup and transition the student. Logs a warning if the student nearly always
    succeeds already.
    """
    first_phase = phase_at(0, config.phases)
    student = rates.get("sampled", rates["greedy"])
    teacher_begins = first_phase.distils or first_phase.epsilon_start > 0
    baseline = rates["teacher"] if teacher_begins else student
    if baseline.k == 0 and not config.evaluation.allow_zero_baseline:
        actor = "teacher" if teacher_begins else "student"
        raise BadInput(
            f"the {actor} succeeded in 0 of {baseline.n} baseline episodes: a policy that never succeeds has nothing "
            "to learn from. Check that --checkpoint, --task-suite, --unnorm-key, --assets and --teacher belong "
            "together. Beside an L1 head leave out --l1-student tokens, or give it a warmup. Or go on from here with "
            "--resume RUN --allow-zero-baseline"
        )
    if student.rate >= NEARLY_ALL:
        advice = "there is little room for improvement; choose other --task-ids, or a higher --temperature"
        log.warning("the student starts with a success of %s: %s", student, advice)


def warmup_has_ended(config: TrainConfig, state: TrainerState) -> bool:
    """Whether the warmup ended after the last evaluation, and the run goes on."""
    warmup_end = end_of_warmup(config.phases)
    is_over = warmup_end <= state.global_step < config.phases.total_steps
    return is_over and state.evaluated_at is not None and state.evaluated_at < warmup_end


def check_imitation(phases: PhaseConfig, rates: Rates) -> None:
    """Check the evaluation after the warmup: raise BadInput if the student did not learn to do as the teacher.

    The student fails only if its success rate is below the required one with a confidence of 95 %.
    """
    required = phases.warmup_success_ratio * rates["teacher"].rate
    _, upper_bound = rates["greedy"].interval
    if upper_bound < required:
        raise BadInput(
            f"after the warmup the greedy student succeeds in {rates['greedy']}, and the teacher in "
            f"{rates['teacher']}: the student did not learn to imitate the teacher. Start again with more "
            "--warmup-steps or --warmup-epochs or another --warmup-lr, or go on from here with --resume RUN "
            "--warmup-success-ratio 0"
        )
