"""What runs in a slot: envs of several tasks beside one another, each drawing its own pictures; how answers travel."""

import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from envs.libero import ChunkResult, EnvSpec, LiberoEnv
from envs.observation import Observation
from envs.worker import KEPT_ENVS, Reset, SlotEnv, Step, pack, unpack
from errors import BadInput


class CountedEnv:
    """Remembers which tasks are built."""

    built: list[int] = []  # noqa: RUF012 - the test's own record, cleared by it
    closed: list[int] = []  # noqa: RUF012

    def __init__(self, spec, task_id):
        self.task_id = task_id
        self.built.append(task_id)

    def reset(self, init_state_id, seed, record):
        return SimpleNamespace(what=("reset", self.task_id), observation=None)

    def step_chunk(self, actions):
        return SimpleNamespace(what=("step", self.task_id), observation=None)

    def close(self):
        self.closed.append(self.task_id)


def test_a_slot_keeps_the_envs_of_its_last_tasks_and_steps_the_last_one():
    CountedEnv.built.clear()
    CountedEnv.closed.clear()
    slot = SlotEnv(None, CountedEnv)
    for task_id in (0, 1, 0, 2, 0, 3, 0):
        assert slot.run(Reset(task_id, 0, 0, False)).what == ("reset", task_id)
        assert slot.run(Step(np.zeros((8, 7)))).what == ("step", task_id)
    assert CountedEnv.built == [0, 1, 2, 3]
    assert CountedEnv.closed == [1]  # the one that was not used for longest
    slot.close()
    assert sorted(CountedEnv.closed) == [0, 1, 2, 3]
    assert KEPT_ENVS == 3


def test_envs_of_one_process_neither_draw_into_nor_delete_each_others_pictures():
    spec = EnvSpec("libero_spatial", (0, 4))
    first, second = LiberoEnv(spec, 0), LiberoEnv(spec, 4)
    try:
        alone = first.reset(3).observation.images
        other = second.reset(3).observation.images
        assert (first.reset(3).observation.images == alone).all()
        assert (second.reset(3).observation.images == other).all()
        first.close()
        assert (second.reset(3).observation.images == other).all()
    finally:
        first.close()
        second.close()


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


def test_bad_input_travels_as_itself():
    memory = mmap.mmap(-1, 4096)
    fault = unpack(*pack(BadInput("no such table; buy one"), memory), memory)
    assert isinstance(fault, BadInput)
    assert str(fault) == "no such table; buy one"
