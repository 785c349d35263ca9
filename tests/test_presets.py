"""Presets: one 7B run per suite with the defaults of the specification, and two small ones that are truly small."""

from typing import get_args

import pytest

from configs.config import Suite, TrainConfig, differing_fields
from configs.presets import PRESETS
from rl.phases import Phase, phase_at


@pytest.mark.parametrize("suite", get_args(Suite))
def test_every_suite_has_a_preset_that_differs_from_the_defaults_only_in_what_it_runs_on(suite):
    changed = differing_fields(TrainConfig(), PRESETS[suite])
    assert set(changed) <= {"task_suite", "checkpoint", "name"}
    assert PRESETS[suite].task.task_suite == suite


@pytest.mark.parametrize("name", ["tiny", "smoke"])
def test_small_presets_go_through_every_phase_and_evaluate_on_the_way(name):
    config = PRESETS[name]
    visited = {phase_at(step, config.phases).phase for step in range(0, config.phases.total_steps)}
    assert visited == set(Phase)
    assert config.evaluation.eval_interval < config.phases.total_steps
