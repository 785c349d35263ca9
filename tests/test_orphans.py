"""No simulator outlives the program, however that ends."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE_S = 300  # for what is certain to happen: only a failing test waits that long

PARENT = """
import signal
import sys
import numpy as np
from benchmarks.stand_in import StandInPolicy
from envs.libero import EnvSpec
from envs.pool import WorkerPool
from tests.fake_env import FakeEnv, HANG, WORK

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with SIGINT ignored

pool = WorkerPool(EnvSpec("libero_spatial", (0,)), 2, FakeEnv)
try:
    for slot, behaviour in enumerate((HANG, WORK)):
        pool.reset(slot, 0, behaviour)
        ((_, result),) = pool.ready()
        print(int(result.observation.proprio[0]), flush=True)
    pool.step(0, np.zeros((8, 7)))
    if sys.argv[1] == "wait":
        print("waiting", flush=True)
        pool.ready()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    pool.close()
"""


def wait_for_end(pid):
    """Wait for the end of a process that is not our child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended = bool(select.select([watch], [], [], PATIENCE_S)[0])
    os.close(watch)
    return ended


def start_parent(mode):
    """A program with one hung and one idle worker; returns it and the workers' process ids."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, mode],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a shell would give it
    )
    return parent, [int(parent.stdout.readline()) for _ in range(2)]


def test_workers_end_when_the_parent_is_killed():
    parent, workers = start_parent("wait")
    assert parent.stdout.readline() == "waiting\n"
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)
    assert all(wait_for_end(pid) for pid in workers)


def test_workers_end_when_the_parent_ends_without_closing_the_pool():
    parent, workers = start_parent("leave")
    _, errors = parent.communicate(timeout=PATIENCE_S)
    assert (parent.returncode, errors) == (0, "")
    assert all(wait_for_end(pid) for pid in workers)


def test_ctrl_c_reaches_the_parent_only():
    parent, workers = start_parent("wait")
    assert parent.stdout.readline() == "waiting\n"
    os.killpg(parent.pid, signal.SIGINT)
    output, errors = parent.communicate(timeout=PATIENCE_S)
    assert (output, errors, parent.returncode) == ("interrupted\n", "", 0)
    assert all(wait_for_end(pid) for pid in workers)
