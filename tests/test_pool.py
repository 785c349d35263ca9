"""The pool of envs: how an episode runs, and every way in which a worker can fail."""

import os
from dataclasses import replace

import numpy as np
import pytest

from contracts import BadInput
from envs.env import EnvSpec, Start
from envs.pool import Pool, make_pool
from envs.task_switcher import TaskSwitcher
from tests.fake_env import DIE, FAULT, HANG, REFUSE, WAIT_FOR_FIFO, WORK, FakeEnv, every_fourth_pixel

SPEC = EnvSpec("libero_spatial", (0, 1, 2))
CHUNK = np.zeros((8, 7))


@pytest.fixture
def pool():
    with Pool(SPEC, 1, FakeEnv) as pool:
        yield pool


def only(results):
    ((slot, result),) = results
    return slot, result


def run_chunk(pool, behaviour=WORK, slot=0, task_id=0):
    """Reset and one chunk; returns the chunk's result."""
    pool.reset(slot, task_id, Start(behaviour))
    assert only(pool.ready())[1].error is None
    pool.step(slot, CHUNK)
    return only(pool.ready())[1]


def worker_of(result):
    return int(result.observation.proprio[0])


def test_an_episode_runs_from_reset_to_done(pool):
    pool.reset(0, 2, Start(WORK))
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
    with pytest.raises(BadInput, match="no such table"):
        run_chunk(pool, REFUSE)


def test_results_come_as_they_are_ready(fifo):
    with Pool(replace(SPEC, assets=str(fifo)), 2, FakeEnv) as pool:
        for slot, behaviour in enumerate((WAIT_FOR_FIFO, WORK)):
            pool.reset(slot, 0, Start(behaviour))
            only(pool.ready())
        for slot in (0, 1):
            pool.step(slot, CHUNK)
        assert only(pool.ready())[0] == 1
        assert pool.ready(timeout_s=0.0) == []  # slot 0 is still at work: no result, no wait
        with open(fifo, "w"):
            assert only(pool.ready())[0] == 0


def test_a_dead_worker_is_replaced_and_its_episode_an_error():
    with Pool(SPEC, 1, FakeEnv) as pool:
        run_chunk(pool, WORK)
        open_files = len(os.listdir("/proc/self/fd"))
        result = run_chunk(pool, DIE)
        assert (result.done, result.success, result.observation) == (True, False, None)
        assert "SIGKILL" in result.error
        assert run_chunk(pool, WORK).error is None
        assert len(os.listdir("/proc/self/fd")) == open_files


def test_a_hung_worker_is_replaced_while_others_work_and_tells_where_it_hung(fifo, capfd):
    with Pool(replace(SPEC, assets=str(fifo)), 2, FakeEnv) as pool:
        for slot, behaviour in enumerate((HANG, WORK)):
            pool.reset(slot, 0, Start(behaviour))
            only(pool.ready())
        for slot in (0, 1):
            pool.step(slot, CHUNK)
        open(fifo, "w").close()
        assert pool._workers[1].connection.poll(timeout=None)  # its answer has come
        pool._workers[0].deadline = 0.0
        results = dict(pool.ready())
        assert results[1].error is None
        assert "SIGABRT" in results[0].error
        assert "in step_chunk" in capfd.readouterr().err
        assert run_chunk(pool, WORK).error is None


def test_a_single_simulator_has_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr("envs.pool.make_env", FakeEnv)
    with make_pool(SPEC, 1) as pool:
        assert worker_of(run_chunk(pool)) != os.getpid()


def test_workers_are_recycled_between_episodes():
    with Pool(SPEC, 1, FakeEnv, recycle_after=2) as pool:
        workers = [worker_of(run_chunk(pool)) for _ in range(5)]
        assert workers[0] == workers[1] != workers[2] == workers[3] != workers[4]


def play(pool, starts):
    """Play two chunks from each start, as many starts at a time as there are slots; returns the three results of each.

    Actions depend on the start and the time alone.
    """
    results = {start: [] for start in starts}
    for first in range(0, len(starts), pool.num_slots):
        playing = dict(enumerate(starts[first : first + pool.num_slots]))
        for slot, start in playing.items():
            pool.reset(slot, 0, start)
        while any(len(results[start]) < 3 for start in playing.values()):
            for slot, result in pool.ready():
                start = playing[slot]
                results[start].append(result)
                if not result.done:
                    generator = np.random.default_rng([start.seed, result.env_steps])
                    pool.step(slot, generator.uniform(-1, 1, (8, 7)))
    return [result for start in starts for result in results[start]]


def test_episodes_of_libero_do_not_depend_on_the_number_of_workers():
    spec = EnvSpec("libero_spatial", (0,), num_images=2, max_env_steps=16)
    starts = [Start(5, seed=5), Start(6, seed=6), Start(None, seed=70), Start(None, seed=71)]
    with make_pool(spec, 1, every_fourth_pixel) as pool:
        alone = play(pool, starts)
    with make_pool(spec, 2, every_fourth_pixel) as pool:
        workers = play(pool, starts)
    for ours, theirs in zip(workers, alone, strict=True):
        assert (ours.env_steps, ours.success, ours.error) == (theirs.env_steps, theirs.success, None)
        if not ours.done:
            np.testing.assert_array_equal(ours.observation.images, theirs.observation.images)
            np.testing.assert_array_equal(ours.observation.proprio, theirs.observation.proprio)
            np.testing.assert_array_equal(ours.observation.state, theirs.observation.state)
    assert workers[0].observation.prepared
    assert workers[0].observation.images.shape == (2, 64, 64, 3)


def test_a_slot_keeps_the_envs_of_its_last_tasks_and_steps_the_last_one():
    built = []
    closed = []

    class RecordedEnv(FakeEnv):
        def __init__(self, spec, task_id):
            super().__init__(spec, task_id)
            built.append(task_id)

        def close(self):
            closed.append(self.task_id)

    slot = TaskSwitcher(replace(SPEC, kept_tasks=3), RecordedEnv)
    for task_id in (0, 1, 0, 2, 0, 3, 0):
        for request in ((task_id, Start(WORK)), CHUNK):
            assert slot(request).observation.proprio[1] == task_id
    assert built == [0, 1, 2, 3]
    assert closed == [1]  # the one that was not used for longest
    with pytest.raises(BadInput, match="14 numbers"):
        slot(np.zeros((8, 14)))
