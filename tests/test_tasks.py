import re
from types import SimpleNamespace

import pytest

from envs import tasks
from envs.libero import EnvSpec, task_files, task_info
from envs.setup import prepare
from envs.tasks import MAX_ENV_STEPS, NUM_SAMPLED_INIT_STATES, libero_root, task_names
from errors import BadInput


@pytest.fixture(scope="module")
def benchmark_suites():
    """LIBERO's own benchmark objects: the authority on task order, instructions and files."""
    prepare()
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
        assert info.num_init_states == 50


def test_step_limits_are_those_of_the_published_evaluation():
    limits = {suite: task_info(EnvSpec(suite, (0,)))[0].max_env_steps for suite in MAX_ENV_STEPS}
    assert limits == {
        "libero_spatial": 220,
        "libero_object": 280,
        "libero_goal": 300,
        "libero_10": 520,
        "libero_90": 400,
    }


def test_unknown_suite_lists_the_suites():
    with pytest.raises(BadInput, match="libero_spatial, libero_object, libero_goal, libero_10, libero_90"):
        EnvSpec("libero_spacial", (0,))


@pytest.mark.parametrize("task_ids", [(10,), (-1,), (0, 99), ()])
def test_unknown_task_id_lists_the_tasks(task_ids):
    with pytest.raises(BadInput, match=r"0\.\.9: 0 open_the_middle_drawer.*9 put_the_wine_bottle_on_the_rack"):
        EnvSpec("libero_goal", task_ids)


def test_missing_bddl_file_is_named(tmp_path):
    spec = EnvSpec("libero_goal", (0,), bddl_file=str(tmp_path / "none.bddl"))
    with pytest.raises(BadInput, match=r"none\.bddl"):
        task_info(spec)


def test_a_file_that_is_no_bddl_is_refused(tmp_path):
    (tmp_path / "odd.bddl").write_text("hello")
    with pytest.raises(BadInput, match="language"):
        task_info(EnvSpec("libero_goal", (0,), bddl_file=str(tmp_path / "odd.bddl")))


def test_a_bddl_file_of_ones_own_is_a_task_with_sampled_states(tmp_path):
    original = libero_root() / "bddl_files" / "libero_goal" / "turn_on_the_stove.bddl"
    own = tmp_path / "light_it.bddl"
    own.write_text(re.sub(r"\(:language [^)]*\)", "(:language Light  the stove)", original.read_text()))
    (info,) = task_info(EnvSpec("libero_goal", (0,), bddl_file=str(own), max_env_steps=70))
    assert (info.name, info.instruction) == ("light_it", "light the stove")
    assert (info.max_env_steps, info.num_init_states) == (70, NUM_SAMPLED_INIT_STATES)


def test_stored_states_beside_a_bddl_file_are_found(tmp_path):
    name = "turn_on_the_stove"
    for folder, suffix in (("bddl_files", ".bddl"), ("init_files", ".pruned_init")):
        source = (libero_root() / folder / "libero_goal" / name).with_suffix(suffix)
        (tmp_path / source.name).write_bytes(source.read_bytes())
    spec = EnvSpec("libero_goal", (0,), bddl_file=str(tmp_path / f"{name}.bddl"))
    assert task_files(spec, 0).init_states == tmp_path / f"{name}.pruned_init"


def test_liberos_own_bddl_file_brings_its_stored_states():
    by_id = task_files(EnvSpec("libero_goal", (7,)), 7)
    by_file = task_files(EnvSpec("libero_goal", (0,), bddl_file=str(by_id.bddl)), 0)
    assert by_file == by_id


@pytest.mark.parametrize("origin", [None, "/nowhere/libero/__init__.py"])
def test_a_libero_that_python_cannot_find_names_the_command(monkeypatch, origin):
    """An editable install of LIBERO's own repository leaves a package without a place."""
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda _: SimpleNamespace(origin=origin))
    with pytest.raises(BadInput, match=r"LIBERO is not installed .*run: pip install --no-deps -r requirements-sim"):
        libero_root.__wrapped__()
