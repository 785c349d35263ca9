"""The expert in LIBERO's physics: at the end of the arm's reach, and onto a stove and a cabinet."""

from types import SimpleNamespace

import numpy as np
import pytest

from contracts import BadInput
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from workshop import expert as stages
from workshop.expert import Expert

TASK_ID = 6
INIT_STATE_ID = 3
LET_GO = np.array([0, 0, 0, 0, 0, 0, -1.0])


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(EnvSpec("libero_spatial", (TASK_ID,)), TASK_ID)
    yield env
    env.close()


def play(env, lets_go_in=(), init_state_id=INIT_STATE_ID):
    """Play an episode, with other actions in some env steps; returns the last result, all stages and all actions."""
    result = env.reset(Start(init_state_id), observe=False)
    expert = Expert(env.domain)
    seen_stages = []
    actions = []
    while not result.done:
        action = expert.decide()
        seen_stages.append(expert.stage)
        actions.append(action)
        executed = LET_GO if result.env_steps in lets_go_in else action
        result = env.step_chunk(executed[None], observe=False)
    return result, seen_stages, np.array(actions)


def test_the_bowl_goes_onto_the_plate_and_again_in_the_same_way(env):
    result, seen_stages, actions = play(env)
    assert result.success
    assert list(dict.fromkeys(seen_stages))[:3] == [stages.REACH, stages.CLOSE, stages.CARRY]
    assert np.abs(actions).max() <= 1.0
    _, _, same_actions = play(env)
    np.testing.assert_array_equal(same_actions, actions)


def test_a_bowl_lost_on_the_way_is_picked_up_again(env):
    result, seen_stages, _ = play(env, lets_go_in=range(60, 66))
    assert seen_stages[59] == stages.CARRY
    assert stages.REACH in seen_stages[66:]
    assert result.success


@pytest.mark.parametrize(("task_id", "target"), [(1, "stove"), (4, "cabinet")])
def test_the_bowl_goes_onto_the_stove_and_onto_the_cabinet(task_id, target):
    """Tasks of libero_goal, which share their scene: the instruction alone says where the bowl is to go."""
    env = LiberoEnv(EnvSpec("libero_goal", (task_id,)), task_id)
    try:
        assert target in env.instruction
        result, _, _ = play(env, init_state_id=0)
        assert result.success
    finally:
        env.close()


def test_tasks_without_bowl_and_plate_are_bad_input():
    domain = SimpleNamespace(parsed_problem={"goal_state": [["in", "milk_1", "basket_1_contain_region"]]})
    with pytest.raises(BadInput, match="milk_1"):
        Expert(domain)
