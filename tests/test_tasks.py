"""Suites, tasks and initial states are LIBERO's own; foreign files cannot run code."""

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts import BadInput
from envs.env import EnvSpec
from envs.libero import task_files
from envs.libero_imports import prepare_imports
from envs.pool import task_info
from envs.tasks import MAX_ENV_STEPS, libero_root, load_init_states, task_names

STORED = libero_root() / "init_files"


@pytest.fixture(scope="module")
def benchmark_suites():
    """LIBERO's own benchmark objects: the authority on task order, instructions and files."""
    prepare_imports()
    from libero.libero import benchmark

    return {suite: benchmark.get_benchmark(suite)() for suite in MAX_ENV_STEPS}


@pytest.mark.parametrize("suite", list(MAX_ENV_STEPS))
def test_tasks_are_those_of_liberos_benchmark(benchmark_suites, suite):
    theirs = benchmark_suites[suite]
    assert list(task_names(suite)) == theirs.get_task_names()
    spec = EnvSpec(suite, tuple(range(theirs.n_tasks)))
    for info in task_info(spec):
        task, files = theirs.get_task(info.task_id), task_files(spec, info.task_id)
        assert (info.name, info.instruction) == (task.name, task.language)
        assert str(files.bddl) == theirs.get_task_bddl_file_path(info.task_id)
        assert files.init_states.name == task.init_states_file
        assert (info.num_init_states, info.max_env_steps) == (50, MAX_ENV_STEPS[suite])


def test_unknown_suites_and_tasks_are_answered_with_those_that_there_are():
    for suite in ("libero_spacial", "libero_90_swap", "libero_goal_env", "swap", "libero_spatial_"):
        with pytest.raises(BadInput, match=r"libero_spatial, .*libero_90.*_swap.*_camera"):
            task_info(EnvSpec(suite, (0,)))
    for task_ids in ((10,), (-1,), (0, 99), (), (1, 1)):
        with pytest.raises(BadInput, match="task"):
            task_info(EnvSpec("libero_goal", task_ids))


def test_states_are_those_that_torch_reads():
    path = sorted((STORED / "libero_goal").glob("*.pruned_init"))[0]
    np.testing.assert_array_equal(load_init_states(path), torch.load(path, weights_only=False))


def test_a_single_state_without_a_table_is_a_table_of_one_row(tmp_path):
    path = tmp_path / "layout.pruned_init"
    torch.save(np.arange(3.0), path)
    np.testing.assert_array_equal(load_init_states(path), [[0.0, 1.0, 2.0]])


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize(
    "content",
    [
        Malicious("trace"),
        [1.0],
        np.zeros((1, 2, 3)),
        np.zeros(0),
        np.array([[np.nan, 1.0]]),
        np.zeros((2, 3), np.float32),
    ],
)
def test_anything_but_a_finite_float64_table_is_refused_and_code_does_not_run(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("odd.pruned_init", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    with pytest.raises(BadInput, match=r"odd\.pruned_init"):
        load_init_states(Path("odd.pruned_init"))
    assert not (tmp_path / "trace").exists()
