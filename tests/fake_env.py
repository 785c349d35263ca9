"""An env without a simulator, for the pools: `init_state_id` says what its first chunk does."""

import os
import signal

import numpy as np

from contracts import BadInput, Observation
from envs.env import ChunkResult

WORK, DIE, HANG, FAULT, REFUSE, WAIT_FOR_FIFO = range(6)
EPISODE_STEPS = 16  # two chunks


class FakeEnv:
    """Every observation tells the process, the task and the initial state that it comes from."""

    name = "set the table"
    action_dim = 7

    def __init__(self, spec, task_id):
        self.spec = spec
        self.task_id = task_id

    def reset(self, start, observe=True):
        self.behaviour = start.init_state_id
        self.env_steps = 0
        return self.result(executed=0)

    def step_chunk(self, actions):
        if self.behaviour == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.behaviour == HANG:
            # A fifo: the test opens the other end, and knows that the hang begins.
            open(self.spec.assets).close()
            while True:
                signal.pause()
        if self.behaviour == FAULT:
            return ChunkResult(None, False, 1, self.env_steps + 1, done=True, error="the table fell over")
        if self.behaviour == REFUSE:
            raise BadInput("no such table; buy one")
        if self.behaviour == WAIT_FOR_FIFO:
            open(self.spec.assets).close()  # returns once somebody opens the other end
        self.env_steps += len(actions)
        return self.result(executed=len(actions))

    def result(self, executed):
        done = self.env_steps >= EPISODE_STEPS
        proprio = np.array([os.getpid(), self.task_id, self.behaviour, 0, 0, 0, 0, 0], float)
        observation = Observation(np.zeros((2, 256, 256, 3), np.uint8), proprio, "set the table")
        return ChunkResult(None if done else observation, done, executed, self.env_steps, done)

    def close(self):
        pass


def every_fourth_pixel(images):
    """Stands for a policy's preprocessing."""
    return np.ascontiguousarray(images[:, ::4, ::4])
