"""Processes that answer: how answers travel, every way in which one can end, and that none outlives the program."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contracts import BadInput
from envs.worker import NoAnswer, ask

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE_S = 300  # for what is certain to happen: only a failing test waits that long

PARENT = """
import signal
import numpy as np
from envs.env import EnvSpec, Start
from envs.pool import Pool
from tests.fake_env import FakeEnv, HANG, WORK

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts with SIGINT ignored

pool = Pool(EnvSpec("libero_spatial", (0,), assets="/dev/null"), 2, FakeEnv)
try:
    for slot, behaviour in enumerate((HANG, WORK)):
        pool.reset(slot, 0, Start(behaviour))
        ((_, result),) = pool.ready()
        print(int(result.observation.proprio[0]), flush=True)
    pool.step(0, np.zeros((8, 7)))
    print("waiting", flush=True)
    pool.ready()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    pool.close()
"""


def raise_bad_input():
    raise BadInput("unset MUJOCO_GL")


def raise_driver_error():
    raise RuntimeError("eglQueryString")


def test_answers_and_problems_come_back():
    assert ask(divmod, 7, 3) == (2, 1)
    with pytest.raises(BadInput, match="unset MUJOCO_GL"):
        ask(raise_bad_input)
    with pytest.raises(NoAnswer, match="RuntimeError: eglQueryString"):
        ask(raise_driver_error)


def start_parent():
    """A program with one hung and one idle worker; returns it and the workers' process ids.

    Its `communicate` returns when the last process that has its stderr is gone: it and its workers.
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a shell would give it
    )
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    assert parent.stdout.readline() == "waiting\n"
    return parent, workers


def test_workers_end_when_the_parent_is_killed_even_if_they_are_stopped():
    """A stopped worker executes no line of ours any more: the kernel ends it."""
    parent, workers = start_parent()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)


def test_ctrl_c_reaches_the_parent_only():
    parent, _ = start_parent()
    os.killpg(parent.pid, signal.SIGINT)
    output, errors = parent.communicate(timeout=PATIENCE_S)
    assert (output, errors, parent.returncode) == ("interrupted\n", "", 0)
