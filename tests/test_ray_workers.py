"""The pool on a Ray cluster: the contract of processes, and a node that is killed."""

import os
from dataclasses import replace

import pytest

from contracts import BadInput
from envs.env import Start
from envs.pool import STEP_TIMEOUT_S, Pool, make_pool
from tests.fake_env import DIE, FAULT, HANG, REFUSE, WAIT_FOR_FIFO, WORK, FakeEnv, every_fourth_pixel
from tests.test_pool import CHUNK, SPEC, only, run_chunk, worker_of

ray = pytest.importorskip("ray")
from envs.ray_workers import RayWorker, connect  # noqa: E402  (it needs ray)


@pytest.fixture(scope="module")
def cluster():
    """One of two nodes, the second of which is to be killed."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # else a token is written into the user's home
        # Ray asks a node five times whether it lives, by default every 3 s.
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": {"health_check_period_ms": 500}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        patch.setenv("RAY_ADDRESS", cluster.address)
        cluster.second = cluster.add_node(num_cpus=1)
        connect()
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def test_faults_are_those_of_processes_and_the_slot_goes_on(cluster):
    spec = replace(SPEC, assets="/dev/null")
    with Pool(spec, 1, FakeEnv, every_fourth_pixel, worker_class=RayWorker) as pool:
        images = run_chunk(pool, WORK).observation.images
        assert images.shape == (2, 64, 64, 3)
        assert images.flags.writeable
        assert run_chunk(pool, FAULT).error == "the table fell over"
        assert "SIGKILL" in run_chunk(pool, DIE).error
        pool._step_timeout_s = 1.0
        assert "SIGABRT" in run_chunk(pool, HANG).error
        pool._step_timeout_s = STEP_TIMEOUT_S
        pool._workers[0].close()  # the actor itself is gone
        pool.reset(0, 0, Start(WORK))
        assert "died" in only(pool.ready())[1].error
        assert run_chunk(pool, WORK).error is None
        with pytest.raises(BadInput, match="no such table"):
            run_chunk(pool, REFUSE)


def test_a_killed_node_costs_the_episode_that_it_played(cluster, fifo):
    with Pool(replace(SPEC, assets=str(fifo)), 2, FakeEnv, worker_class=RayWorker) as pool:
        for slot in (0, 1):
            run_chunk(pool, WORK, slot)
            pool.reset(slot, 0, Start(WAIT_FOR_FIFO))
            only(pool.ready())
        for slot in (0, 1):
            pool.step(slot, CHUNK)
        cluster.remove_node(cluster.second, allow_graceful=False)
        lost, result = only(pool.ready())
        assert "died" in result.error
        assert (result.done, result.observation) == (True, None)
        assert run_chunk(pool, WORK, lost).error is None  # on the other node
        with open(fifo, "w"):
            slot, result = only(pool.ready())
        assert (slot, result.error, result.env_steps) == (1 - lost, None, 8)


def test_a_pool_on_the_cluster_is_made_from_the_same_recipe(cluster, monkeypatch):
    monkeypatch.setattr("envs.pool.make_env", FakeEnv)
    with make_pool(SPEC, 2, every_fourth_pixel, "ray") as pool:
        workers = {worker_of(run_chunk(pool, slot=slot)) for slot in (0, 1)}
        assert len(workers | {os.getpid()}) == 3
