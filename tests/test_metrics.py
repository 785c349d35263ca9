"""The metrics of an update: right, and under the names of the specification."""

import pytest

from experiment.metrics import rollout_metrics
from rl.phases import Phase, PhaseState
from rl.rollout import Rollout
from tests.fakes import trajectory


def test_rollout_metrics_count_successes_by_task_and_decisions_by_teacher():
    trajectories = [
        trajectory(2, success=True, index=0, task_id=0, group=0),
        trajectory(3, success=False, index=1, task_id=4, group=0),
        trajectory(3, success=True, index=2, task_id=4, group=1),
    ]
    for decision in trajectories[0].decisions:
        decision.by_teacher = True
    times = {"sim": 3.0, "render": 2.0, "infer": 1.0, "wait": 0.5}
    rollout = Rollout(trajectories, times, wall_s=7.25, errors=2)
    metrics = rollout_metrics(rollout, PhaseState(Phase.TRANSITION, 0.25), {4: 0.75})
    expected = {
        "rollout/success_rate": 2 / 3,
        "rollout/success_rate_task_0": 1.0,
        "rollout/success_rate_task_4": 0.5,
        "rollout/env_steps_per_s": (8 + 12 + 12) / 7.25,
        "rollout/teacher_fraction": 2 / 8,
        "curriculum/probability_task_4": 0.75,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
