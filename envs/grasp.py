"""Where to take a bowl by its rim: the place and the yaw at which the open gripper hits nothing else."""

from dataclasses import dataclass
from itertools import product

import mujoco
import numpy as np

RIM_RADIUS_M = 0.048  # of LIBERO's black bowl, to the middle of its slanted wall at the depth of the fingertips
RIM_HEIGHT_M = 0.040  # of the grip site above the bowl's origin: the fingertips reach 2 cm below the rim's edge
YAWS_DEG = (0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75, 90)  # the arm starts at 0
REACH_M = 0.74  # horizontal, from the robot's base: beyond, the elbow straightens and the controller loses the arm
TURN_PER_REACH = 60.0  # rad that are worth turning the hand to reach 1 m less far
SIDE_BIAS_M = 0.03  # to the left side, lest millimetres decide where both are about as near
CLEARANCE_M = 0.006
ROBOT_BODIES = ("robot", "gripper", "mount")


@dataclass(frozen=True)
class Grasp:
    """A rim grasp. The fingers open along `finger_axis`, one inside the bowl and one outside."""

    yaw: float  # rad, of the hand about the vertical
    offset: np.ndarray  # (3,) m, from the bowl's origin to the grip site


def finger_axis(yaw: float) -> np.ndarray:
    return np.array([-np.sin(yaw), np.cos(yaw), 0.0])


def choose_grasp(
    model: mujoco.MjModel, data: mujoco.MjData, bowl_body: int, eef: np.ndarray, base: np.ndarray
) -> Grasp:
    """The grasp with the fewest collisions; among equals the least turn and stretch, then the side nearer to the hand.

    `eef` and `base` (3,) are the positions of the grip site and of the robot's base.
    """
    obstacles = _box_obstacles(model, bowl_body)

    def cost(grasp: Grasp) -> tuple[int, float, float]:
        place = data.xpos[bowl_body] + grasp.offset
        hits = _count_inside(place + _hand_points(grasp.yaw), model, data, obstacles)
        stretch = max(0.0, float(np.linalg.norm((place - base)[:2])) - REACH_M)
        bias = SIDE_BIAS_M * (grasp.offset @ finger_axis(grasp.yaw) > 0)
        return hits, abs(grasp.yaw) + TURN_PER_REACH * stretch, float(np.linalg.norm(place - eef)) - bias

    return min(_candidates(), key=cost)


def _candidates() -> list[Grasp]:
    height = np.array([0.0, 0.0, RIM_HEIGHT_M])
    return [
        Grasp(yaw, side * RIM_RADIUS_M * finger_axis(yaw) + height)
        for yaw, side in product(np.radians(YAWS_DEG), (-1.0, 1.0))
    ]


def _hand_points(yaw: float) -> np.ndarray:
    """(N, 3) points of the open gripper about its grip site: two fingers, and the hand above them."""
    fingers = product((-0.05, -0.04, 0.04, 0.05), (-0.012, 0.0, 0.012), (-0.012, 0.0, 0.03))
    hand = product((-0.10, -0.05, 0.0, 0.05, 0.10), (-0.03, 0.0, 0.03), (0.07,))
    along, across, up = np.array([*fingers, *hand]).T
    sideways = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    return along[:, None] * finger_axis(yaw) + across[:, None] * sideways + up[:, None] * [0.0, 0.0, 1.0]


def _box_obstacles(model: mujoco.MjModel, bowl_body: int) -> np.ndarray:
    """Ids of the collision boxes, of which LIBERO's scenes are made, except those of the robot and of the bowl."""
    robot = [body for body in range(model.nbody) if model.body(body).name.startswith(ROBOT_BODIES)]
    is_obstacle = (model.geom_contype != 0) & (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX)
    return np.flatnonzero(is_obstacle & ~np.isin(model.geom_bodyid, [*robot, bowl_body]))


def _count_inside(points: np.ndarray, model: mujoco.MjModel, data: mujoco.MjData, boxes: np.ndarray) -> int:
    """How often one of the points (N, 3) lies in one of the boxes."""
    rotations = data.geom_xmat[boxes].reshape(-1, 3, 3)
    local = np.einsum("nbi,bij->nbj", points[:, None] - data.geom_xpos[boxes], rotations)
    return int((np.abs(local) < model.geom_size[boxes] + CLEARANCE_M).all(axis=-1).sum())
