"""Processes that answer: how answers travel, every way in which one can end, and that none outlives the program."""

import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts import BadInput, Observation
from envs.libero import ChunkResult
from envs.rendering import find_renderer
from envs.worker import NoAnswer, Worker, ask, pack, unpack

PROJECT = Path(__file__).resolve().parent.parent
PATIENCE_S = 300  # for what is certain to happen: only a failing test waits that long

PARENT = """
import os, signal, sys
import numpy as np
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


def answer(seed: int, num_frames: int) -> ChunkResult:
    rng = np.random.default_rng(seed)
    frames = [rng.integers(0, 256, (256, 256, 3), dtype=np.uint8) for _ in range(num_frames)]
    images = rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    return ChunkResult(Observation(images, rng.normal(size=8), "stack them"), False, 8, 16, False, frames=frames)


def assert_equal(one: ChunkResult, other: ChunkResult) -> None:
    np.testing.assert_array_equal(one.observation.images, other.observation.images)
    np.testing.assert_array_equal(one.observation.proprio, other.observation.proprio)
    np.testing.assert_array_equal(one.frames, other.frames)
    assert one.observation.instruction == other.observation.instruction


@pytest.mark.parametrize("num_frames", [0, 9])
def test_an_answer_arrives_as_sent_and_outlives_the_next_one(num_frames):
    memory = mmap.mmap(-1, 4 * 2**20)
    first, second = answer(0, num_frames), answer(1, num_frames)
    received = unpack(*pack(first, memory), memory)
    again = unpack(*pack(second, memory), memory)
    assert_equal(received, first)
    assert_equal(again, second)
    assert len(pack(first, memory)[0]) < 2000  # images are not in the message


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


def test_a_crash_is_named_by_its_signal_and_a_hang_is_ended():
    with pytest.raises(NoAnswer, match="SIGABRT"):
        ask(os.abort)
    with pytest.raises(NoAnswer, match="no answer within 1 s"):
        ask(signal.pause, answer_s=1)


def test_when_whoever_asked_is_gone_the_process_ends_without_a_word(capfd):
    worker = Worker(dict)
    worker.close()
    assert (worker.end(), capfd.readouterr().err) == ("exit code 0", "")


def test_the_driver_is_named():
    renderer = ask(find_renderer)
    assert renderer.name
    assert renderer.vendor
    assert renderer.backend in ("egl", "osmesa")


def test_a_driver_that_egl_cannot_find_is_advice(monkeypatch):
    monkeypatch.setenv("__EGL_VENDOR_LIBRARY_DIRS", "/nowhere")
    with pytest.raises(BadInput, match=r"EGL device 0 of 0 cannot be initialised; run: apt-get install"):
        ask(find_renderer)


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


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_when_the_parent_is_killed_even_if_they_are_stopped(stopped):
    """A stopped worker executes no line of ours any more: the kernel ends it."""
    parent, workers = start_parent("wait")
    assert parent.stdout.readline() == "waiting\n"
    if stopped:
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
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
