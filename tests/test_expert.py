"""The expert in LIBERO's physics, on the task whose bowl lies at the end of the arm's reach."""

from types import SimpleNamespace

import mujoco
import numpy as np
import pytest

from contracts import BadInput
from envs.libero import EnvSpec, LiberoEnv
from workshop import expert as stages
from workshop.expert import RIM_RADIUS_M, Expert, plan_grasp

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
    assert [stage for stage in ORDER if stage in order] == list(dict.fromkeys(order))  # none begins before its turn
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


BOWL = np.array([0.0, 0.0, 0.9])
ABOVE = BOWL - [0.0, 0.2, -0.3]  # where the hand waits: on the side of negative y
NEAR_BASE = BOWL - [0.6, 0.0, 0.0]


def scene(*obstacles: tuple[str, str]) -> tuple[mujoco.MjModel, mujoco.MjData, int]:
    """A box of the bowl's size and boxes given as (position, half extents)."""
    boxes = "".join(f'<geom type="box" pos="{pos}" size="{size}"/>' for pos, size in obstacles)
    model = mujoco.MjModel.from_xml_string(
        f'<mujoco><worldbody><body name="bowl" pos="0 0 0.9"><geom type="box" size=".05 .05 .02"/></body>{boxes}'
        '<body name="robot0_link1"><geom type="box" pos="0 0 0.9" size="1 1 1"/></body></worldbody></mujoco>'
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data, model.body("bowl").id


def test_a_wall_beside_the_bowl_sends_the_hand_to_the_other_side():
    grasp = plan_grasp(*scene(("0 -.085 .95", ".3 .02 .1")), ABOVE, NEAR_BASE)
    assert grasp.yaw == 0.0
    np.testing.assert_allclose(grasp.offset[:2], [0.0, RIM_RADIUS_M])


def test_a_bowl_at_the_end_of_the_reach_is_taken_on_the_side_of_the_robot():
    base = BOWL - [0.8, 0.0, 0.0]
    grasp = plan_grasp(*scene(), ABOVE, base)
    assert np.linalg.norm((BOWL + grasp.offset - base)[:2]) < 0.8 - 0.9 * RIM_RADIUS_M
