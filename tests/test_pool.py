import os
import sys
from dataclasses import replace

import numpy as np
import pytest

from contracts import BadInput
from envs import pool as pool_module
from envs.env import EnvSpec
from envs.pool import Pool, make_pool
from envs.slot import Reset, SlotEnv
from envs.worker import InlineWorker, ProcessWorker
from tests.fake_env import DIE, FAULT, HANG, REFUSE, WAIT_FOR_FIFO, WORK, FakeEnv, every_fourth_pixel

SPEC = EnvSpec("libero_spatial", (0, 1, 2))
CHUNK = np.zeros((8, 7))


def inline_pool():
    return Pool(SPEC, 1, FakeEnv, workers="inline")


def worker_pool(num_envs=2, **arguments):
    return Pool(SPEC, num_envs, FakeEnv, **arguments)


@pytest.fixture(params=[inline_pool, worker_pool], ids=["inline", "workers"])
def pool(request):
    with request.param() as pool:
        yield pool


def only(results):
    ((slot, result),) = results
    return slot, result


def run_chunk(pool, behaviour=WORK, slot=0, task_id=0):
    """Reset and one chunk; returns the chunk's result."""
    pool.reset(slot, task_id, behaviour)
    assert only(pool.ready())[1].error is None
    pool.step(slot, CHUNK)
    return only(pool.ready())[1]


def worker_of(result):
    return int(result.observation.proprio[0])


def test_an_episode_runs_from_reset_to_done(pool):
    pool.reset(0, task_id=2, init_state_id=WORK)
    slot, result = only(pool.ready())
    assert slot == 0
    assert list(result.observation.proprio[1:3]) == [2, WORK]
    steps = []
    while not result.done:
        pool.step(0, CHUNK)
        result = only(pool.ready())[1]
        steps.append((result.executed, result.env_steps))
    assert steps == [(8, 8), (8, 16)]
    assert result.success
    assert pool.ready() == []


def test_a_fault_is_the_error_of_its_episode_and_the_slot_goes_on(pool):
    assert run_chunk(pool, FAULT).error == "the table fell over"
    assert run_chunk(pool, WORK).error is None


def test_bad_input_reaches_the_caller(pool):
    with pytest.raises(BadInput, match="no such table; buy one"):
        run_chunk(pool, REFUSE)


def test_results_come_as_they_are_ready(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    spec = EnvSpec("libero_spatial", (0,), assets=str(fifo))
    with Pool(spec, 2, FakeEnv) as pool:
        for slot, behaviour in enumerate((WAIT_FOR_FIFO, WORK)):
            pool.reset(slot, 0, behaviour)
            only(pool.ready())
        for slot in (0, 1):
            pool.step(slot, CHUNK)
        assert only(pool.ready())[0] == 1
        assert pool.ready(timeout_s=0.0) == []  # slot 0 is still at work: no result, no wait
        with open(fifo, "w"):
            assert only(pool.ready())[0] == 0


@pytest.fixture
def strict_pool():
    """Workers that get two seconds for a chunk."""
    with worker_pool(num_envs=1, step_timeout_s=2.0) as pool:
        yield pool


def test_a_dead_worker_is_replaced_and_its_episode_an_error(strict_pool):
    run_chunk(strict_pool, WORK)
    files = os.listdir("/proc/self/fd")
    result = run_chunk(strict_pool, DIE)
    assert (result.done, result.success, result.observation) == (True, False, None)
    assert "died (SIGKILL)" in result.error
    assert run_chunk(strict_pool, WORK).error is None
    assert len(os.listdir("/proc/self/fd")) == len(files)


def test_a_hung_worker_is_replaced_and_tells_where_it_hung(capfd):
    with worker_pool(num_envs=1, step_timeout_s=2.0) as pool:
        assert "gave no answer in time (SIGABRT)" in run_chunk(pool, HANG).error
        assert "hang_for_ever" in capfd.readouterr().err
        assert run_chunk(pool, WORK).error is None


def test_a_hung_worker_is_found_while_others_keep_the_pool_busy():
    with worker_pool(2, step_timeout_s=2.0) as pool:
        for slot, behaviour in enumerate((HANG, WORK)):
            pool.reset(slot, 0, behaviour)
            only(pool.ready())
        for slot in (0, 1):
            pool.step(slot, CHUNK)
        errors = {}
        while 0 not in errors:
            for slot, result in pool.ready():
                errors[slot] = result.error
                if slot == 1:
                    pool.reset(1, 0, WORK)
    assert "gave no answer in time" in errors[0]
    assert errors[1] is None


def test_workers_are_recycled_between_episodes():
    with worker_pool(num_envs=1, recycle_after=2) as pool:
        workers = [worker_of(run_chunk(pool)) for _ in range(5)]
        assert workers[0] == workers[1] != workers[2] == workers[3] != workers[4]


def test_no_worker_outlives_the_pool():
    with worker_pool(2) as pool:
        workers = [worker_of(run_chunk(pool, slot=slot)) for slot in (0, 1)]
        pool.reset(0, 0, HANG)
        only(pool.ready())
        pool.step(0, CHUNK)  # one idle, one at work
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def play(pool, init_state_ids):
    """Two chunks of an initial state's own actions; returns all results by initial state, fresh ones by their seed."""
    waiting, playing, results = list(init_state_ids), {}, {i: [] for i in init_state_ids}

    def start(slot):
        if waiting:
            playing[slot] = waiting.pop(0)
            pool.reset(slot, 0, playing[slot] if playing[slot] < 50 else None, seed=playing[slot])

    for slot in range(pool.num_slots):
        start(slot)
    while sum(map(len, results.values())) < 3 * len(results):
        for slot, result in pool.ready():
            results[playing[slot]].append(result)
            if result.done:
                start(slot)
            else:
                generator = np.random.default_rng([playing[slot], result.env_steps])
                pool.step(slot, generator.uniform(-1, 1, (8, 7)))
    return results


def test_episodes_of_libero_do_not_depend_on_the_number_of_workers():
    spec = EnvSpec("libero_spatial", (0,), num_images=2, max_env_steps=16)
    outcomes = []
    for num_envs in (1, 2):
        with make_pool(spec, num_envs, every_fourth_pixel) as pool:
            outcomes.append(play(pool, (5, 6, 70, 71)))
    for inline, worker in zip(
        *([r for i in results for r in results[i]] for results in outcomes), strict=True
    ):
        assert (inline.env_steps, inline.success, inline.error) == (worker.env_steps, worker.success, None)
        if not inline.done:
            assert inline.observation.prepared
            assert worker.preprocess_s > 0
            assert inline.observation.images.shape == (2, 64, 64, 3)
            np.testing.assert_array_equal(inline.observation.images, worker.observation.images)
            np.testing.assert_array_equal(inline.observation.proprio, worker.observation.proprio)


def test_one_env_is_inline_and_more_are_processes_and_a_simulator_that_differs_is_warned_of(
    monkeypatch, caplog
):
    monkeypatch.setattr(pool_module, "check_versions", lambda: "mujoco 3.3.5 differs")
    for num_envs, kind in ((1, InlineWorker), (2, ProcessWorker)):
        with make_pool(SPEC, num_envs) as pool:
            assert all(type(worker) is kind for worker in pool._workers)
            assert os.path.isdir(pool.spec.assets)  # found by the parent, once for all workers
    assert caplog.messages == ["mujoco 3.3.5 differs"] * 2


def test_a_slot_keeps_the_envs_of_its_last_tasks_and_steps_the_last_one(monkeypatch):
    built, closed = [], []
    monkeypatch.setattr(FakeEnv, "close", lambda env: closed.append(env.task_id))
    slot = SlotEnv(
        replace(SPEC, kept_tasks=3), lambda spec, task_id: built.append(task_id) or FakeEnv(spec, task_id)
    )
    for task_id in (0, 1, 0, 2, 0, 3, 0):
        for request in (Reset(task_id, WORK, 0, False), CHUNK):
            assert slot(request).observation.proprio[1] == task_id
    assert built == [0, 1, 2, 3]
    assert closed == [1]  # the one that was not used for longest
    slot.close()
    assert sorted(closed) == [0, 1, 2, 3]


def test_without_ray_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "envs.ray_workers", raising=False)
    with pytest.raises(BadInput, match=r"Ray is not installed; run: pip install -r requirements-ray\.txt"):
        make_pool(SPEC, 2, simulators="ray")
