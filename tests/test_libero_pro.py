"""LIBERO-PRO as published, and BDDL files of a checkout of it."""

import shutil

import numpy as np
import pytest

from envs.bddl import read_instruction
from envs.data_packages import LIBERO_PRO, packages_folder
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.libero_pro import pro_task
from envs.pool import task_info
from envs.tasks import PRO_CHANGES, PUBLISHED_SUITES, bddl_task, load_init_states, suite_task, task_names
from tests.liberos_loop import needs_official

needs_wheel = pytest.mark.skipif(
    not (packages_folder() / LIBERO_PRO).is_file(), reason="its package is not there: make .venv/development"
)


@needs_wheel
@pytest.mark.parametrize("suite", PUBLISHED_SUITES)
@pytest.mark.parametrize("change", PRO_CHANGES)
def test_every_suite_has_ten_tasks_of_fifty_states_and_the_right_instructions(suite, change):
    infos = task_info(EnvSpec(f"{suite}_{change}", tuple(range(10))))
    assert [info.name for info in infos] == list(task_names(suite))
    assert {info.num_init_states for info in infos} == {50}
    for info in infos:
        liberos = suite_task(suite, info.task_id)
        files = pro_task(f"{suite}_{change}", info.task_id)
        if change in ("swap", "object"):
            assert info.instruction == liberos.instruction
        else:
            assert liberos.instruction != info.instruction == read_instruction(files.bddl)
        rows = set(map(tuple, load_init_states(files.init_states)))
        assert rows.isdisjoint(map(tuple, load_init_states(liberos.init_states)))


@needs_wheel
@needs_official
def test_a_task_with_objects_that_libero_does_not_know_is_built():
    env = LiberoEnv(EnvSpec("libero_spatial_object", (0,), assets="official"), 0)
    assert env.reset(Start(0), observe=False).error is None
    assert "black_bowl_1" in env.domain.objects_dict
    env.close()


@pytest.fixture
def checkout(tmp_path):
    """A task with changed states, as a checkout of LIBERO-PRO keeps it; returns (BDDL file, file of states)."""
    files = suite_task("libero_goal", 7)
    bddl = tmp_path / "bddl_files" / "libero_goal_swap" / files.bddl.name
    states = tmp_path / "init_files" / "libero_goal_swap" / files.init_states.name
    for source, copy in ((files.bddl, bddl), (files.init_states, states)):
        copy.parent.mkdir(parents=True)
        shutil.copy(source, copy)
    return bddl, states


def test_states_of_a_checkout_are_used(checkout):
    bddl, states = checkout
    assert bddl_task(str(bddl)).init_states == states
    for task_id in range(10):  # LIBERO's own files are kept in the same way
        files = suite_task("libero_10", task_id)
        assert bddl_task(str(files.bddl)).init_states.samefile(files.init_states)


def test_states_beside_the_file_come_first_and_may_be_numpys(checkout):
    bddl, states = checkout
    beside = bddl.with_suffix(".pruned_init.npz")
    table = load_init_states(states)
    np.savez(beside, states=table[:3])
    task = bddl_task(str(bddl))
    assert task.init_states == beside
    assert (load_init_states(beside) == table[:3]).all()
