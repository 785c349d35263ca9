"""What runs in a slot: envs of several tasks beside one another, each drawing its own pictures."""

import numpy as np

from envs.libero import EnvSpec, LiberoEnv
from envs.worker import KEPT_ENVS, Reset, SlotEnv, Step


class CountedEnv:
    """Remembers which tasks are built."""

    built: list[int] = []  # noqa: RUF012 - the test's own record, cleared by it
    closed: list[int] = []  # noqa: RUF012

    def __init__(self, spec, task_id):
        self.task_id = task_id
        self.built.append(task_id)

    def reset(self, init_state_id, seed, record):
        return ("reset", self.task_id)

    def step_chunk(self, actions):
        return ("step", self.task_id)

    def close(self):
        self.closed.append(self.task_id)


def test_a_slot_keeps_the_envs_of_its_last_tasks_and_steps_the_last_one():
    CountedEnv.built.clear()
    CountedEnv.closed.clear()
    slot = SlotEnv(None, CountedEnv)
    for task_id in (0, 1, 0, 2, 0, 3, 0):
        assert slot.run(Reset(task_id, 0, 0, False)) == ("reset", task_id)
        assert slot.run(Step(np.zeros((8, 7)))) == ("step", task_id)
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
