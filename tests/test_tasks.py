import errno
import os
import pickle
import stat
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from contracts import BadInput
from envs import data_packages, tasks
from envs.data_packages import LIBERO_PRO, packaged_file
from envs.env import EnvSpec
from envs.libero import task_files
from envs.pool import task_info
from envs.rendering import prepare_imports, write_libero_config
from envs.tasks import (
    MAX_ENV_STEPS,
    cache_dir,
    libero_root,
    load_init_states,
    task_names,
)

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


@pytest.mark.parametrize("task_ids", [(10,), (-1,), (0, 99), (), (1, 1)])
def test_unknown_suites_and_tasks_are_answered_with_those_that_there_are(task_ids):
    with pytest.raises(BadInput, match="libero_spatial, libero_object, libero_goal, libero_10, libero_90"):
        EnvSpec("libero_spacial", task_ids)
    with pytest.raises(
        BadInput, match=r"0\.\.9, each once, found .*: 0 open_the_middle_drawer.*9 put_the_wine_bottle"
    ):
        EnvSpec("libero_goal", task_ids)


@pytest.mark.parametrize("origin", [None, "/nowhere/libero/__init__.py"])
def test_a_libero_that_python_cannot_find_names_the_command(monkeypatch, origin):
    """An editable install of LIBERO's own repository leaves a package without a place."""
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda _: SimpleNamespace(origin=origin))
    with pytest.raises(
        BadInput, match=r"LIBERO is not installed; run: pip install --no-deps -r requirements-sim"
    ):
        libero_root.__wrapped__()


@pytest.mark.parametrize("suite", list(MAX_ENV_STEPS))
def test_states_are_those_that_torch_reads(suite):
    path = sorted((STORED / suite).glob("*.pruned_init"))[0]
    np.testing.assert_array_equal(load_init_states(path), torch.load(path, weights_only=False))


class Malicious:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize(
    "content",
    [Malicious("trace"), [1.0], np.zeros(3), np.array([[np.nan, 1.0]]), np.zeros((2, 3), np.float32)],
)
def test_anything_but_a_finite_float64_table_is_refused_and_code_does_not_run(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("odd.pruned_init", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    with pytest.raises(BadInput, match=r"unreadable: odd\.pruned_init"):
        load_init_states(Path("odd.pruned_init"))
    assert not (tmp_path / "trace").exists()


def test_damaged_and_missing_files_are_named(tmp_path):
    whole = sorted((STORED / "libero_goal").glob("*.pruned_init"))[0].read_bytes()
    (tmp_path / "truncated.pruned_init").write_bytes(whole[: len(whole) // 2])
    for name in ("truncated", "missing"):
        with pytest.raises(BadInput, match=rf"{name}\.pruned_init"):
            load_init_states(tmp_path / f"{name}.pruned_init")


@pytest.fixture
def temporary_folder(monkeypatch, tmp_path):
    """The system's; the user's home cannot be written: no folder can be made under a file, whoever asks."""
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("VLA_GRPO_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tasks.tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def no_temporary_folder() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")


def test_where_nothing_else_can_be_written_the_named_folder_is_enough(monkeypatch, temporary_folder):
    monkeypatch.setattr(tasks.tempfile, "gettempdir", no_temporary_folder)
    with pytest.raises(BadInput, match=r"cannot be written .*VLA_GRPO_CACHE"):
        cache_dir()
    monkeypatch.setenv("VLA_GRPO_CACHE", str(temporary_folder / "cache"))
    assert cache_dir() == temporary_folder / "cache"


@pytest.mark.parametrize(
    ("part", "write"),
    [("libero", write_libero_config), ("benchmarks", lambda: packaged_file(LIBERO_PRO, "a/file"))],
)
def test_a_cache_that_cannot_be_written_is_one_line_with_its_name(monkeypatch, tmp_path, part, write):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    monkeypatch.setattr(data_packages, "_opened", lambda _: SimpleNamespace(read=lambda _: b""))
    (tmp_path / part).touch()  # no folder can be made in its place, whoever asks
    with pytest.raises(BadInput, match=rf"{tmp_path}.* cannot be written .*VLA_GRPO_CACHE"):
        write()


def test_unusable_home_leads_to_a_private_temporary_folder_that_is_not_someone_elses(
    monkeypatch, temporary_folder
):
    folder = cache_dir()
    assert folder == temporary_folder / f"vla-grpo-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_dir() == folder
    stranger = os.getuid() + 1
    monkeypatch.setattr(tasks.os, "getuid", lambda: stranger)
    taken = temporary_folder / f"vla-grpo-{stranger}"
    taken.mkdir()  # by us: for the stranger, someone else
    new_folder = cache_dir()
    assert new_folder.parent == temporary_folder
    assert new_folder != taken
    assert cache_dir() == new_folder
