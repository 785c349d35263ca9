"""The observations on which the checks before a run try the policy."""

import numpy as np
import pytest

from configs.sections import TaskConfig
from contracts import BadInput
from envs.env import EnvSpec
from envs.pool import Pool
from envs.worker import InlineWorker
from experiment.first_observations import first_observations, instruction_of_another_task
from tests.fakes import FakePool, Script


def test_a_simulator_that_fails_at_its_first_reset_is_bad_input():
    faulty = FakePool(lambda *_: Script(8, faults=1), num_slots=1)
    with pytest.raises(BadInput, match=r"\(task 0: planted fault\).*pip install"):
        first_observations(faulty, TaskConfig())


@pytest.mark.parametrize("states", [(0, 40), (14, 15), "fresh"])
def test_the_other_observations_show_moved_objects_and_a_moved_arm(states):
    task = TaskConfig("libero_spatial", (0,), train_init_states=states)
    with Pool(EnvSpec("libero_spatial", (0,), num_images=1), worker_class=InlineWorker) as pool:
        first, (moved_objects, moved_arm) = first_observations(pool, task)
    assert not np.array_equal(moved_objects.images, first.images)
    assert not np.array_equal(moved_arm.images, first.images)
    assert np.abs(moved_arm.proprio - first.proprio).max() > 0.02


def test_images_that_are_the_same_again_are_no_other_images():
    """As of a simulator that knows no perturbations and has one initial state. The fake's images are all black."""
    pool = FakePool(lambda *_: Script(8), num_slots=1)
    assert first_observations(pool, TaskConfig(train_init_states=(3, 4))).from_other_starts == []


def test_the_other_instruction_is_that_of_the_next_task():
    assert instruction_of_another_task(TaskConfig("libero_goal", (6,))) == "turn on the stove"
    assert (
        instruction_of_another_task(TaskConfig("libero_goal", (9,)))
        == "open the middle drawer of the cabinet"
    )
    # Meta-World's env has one camera only, and refuses to be asked for two.
    assert (
        instruction_of_another_task(TaskConfig("metaworld_mt50", (38,))) == "pull the thermos with the stick"
    )
