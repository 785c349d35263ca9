import mujoco
import numpy as np

from envs.grasp import RIM_RADIUS_M, choose_grasp

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


def test_a_free_bowl_is_taken_without_turning_on_the_side_of_the_hand():
    grasp = choose_grasp(*scene(), ABOVE, NEAR_BASE)
    assert grasp.yaw == 0.0
    np.testing.assert_allclose(grasp.offset[:2], [0.0, -RIM_RADIUS_M])


def test_a_wall_beside_the_bowl_sends_the_hand_to_the_other_side():
    grasp = choose_grasp(*scene(("0 -.085 .95", ".3 .02 .1")), ABOVE, NEAR_BASE)
    assert grasp.yaw == 0.0
    np.testing.assert_allclose(grasp.offset[:2], [0.0, RIM_RADIUS_M])


def test_between_two_walls_the_hand_turns():
    walls = ("0 -.085 .95", ".3 .02 .1"), ("0 .085 .95", ".3 .02 .1")
    assert abs(choose_grasp(*scene(*walls), ABOVE, NEAR_BASE).yaw) > np.radians(30)


def test_a_bowl_at_the_end_of_the_reach_is_taken_on_the_side_of_the_robot():
    base = BOWL - [0.8, 0.0, 0.0]
    grasp = choose_grasp(*scene(), ABOVE, base)
    assert np.linalg.norm((BOWL + grasp.offset - base)[:2]) < 0.8 - 0.9 * RIM_RADIUS_M
