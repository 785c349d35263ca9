"""The expert in LIBERO's physics, on the task whose bowl lies at the end of the arm's reach."""

from types import SimpleNamespace

import numpy as np
import pytest

from contracts import BadInput
from envs.env import EnvSpec
from envs.libero import LiberoEnv
from workshop import expert as stages
from workshop.expert import Expert

TASK = 6
ORDER = [stages.HOVER, stages.DESCEND, stages.CLOSE, stages.LIFT, stages.CARRY, stages.LOWER, stages.RELEASE,
         stages.RETREAT]  # fmt: skip


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(EnvSpec("libero_spatial", (TASK,)), TASK)
    yield env
    env.close()


def run(env, init_state_id, until=None, disturb=lambda step, action: action) -> tuple[object, list]:
    """Play until the stage `until` begins or the episode is over: the last result, and all stages and actions."""
    result = env.reset(init_state_id, observe=False)
    expert, decisions = Expert(env.domain), []
    while not result.done:
        decisions.append(expert.decide())
        if decisions[-1][0] is until:
            break
        result = env.step_chunk(disturb(result.env_steps, decisions[-1][1])[None], observe=False)
    return result, decisions


def test_the_bowl_goes_through_all_stages_onto_the_plate_and_again_in_the_same_way(env):
    result, decisions = run(env, 3)
    assert result.success
    order = [stage for i, (stage, _) in enumerate(decisions) if i == 0 or decisions[i - 1][0] is not stage]
    assert [stage for stage in ORDER if stage in order] == list(
        dict.fromkeys(order)
    )  # none begins before its turn
    assert set(ORDER[:5]) <= set(order)
    actions = np.array([action for _, action in decisions])
    assert np.abs(actions).max() <= 1.0
    again, same = run(env, 3)  # on the kept env
    assert again.env_steps == result.env_steps
    np.testing.assert_array_equal([action for _, action in same], actions)


def test_a_bowl_lost_on_the_way_is_picked_up_again(env):
    def let_go(step, action):
        return np.array([0, 0, 0, 0, 0, 0, -1.0]) if 60 <= step < 66 else action

    result, decisions = run(env, 3, disturb=let_go)
    seen = [stage for stage, _ in decisions]
    assert seen[59] == stages.CARRY
    assert stages.HOVER in seen[66:]
    assert result.success


def test_tasks_without_bowl_and_plate_are_bad_input():
    problem = {"goal_state": [["in", "milk_1", "basket_1_contain_region"]]}
    with pytest.raises(BadInput, match="milk_1"):
        Expert(SimpleNamespace(parsed_problem=problem))
