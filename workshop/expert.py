"""A scripted expert that moves LIBERO's black bowl onto a plate, a stove or a cabinet, from the simulation's state.

At every env step it decides afresh, from the present state alone (`State`): it counts nothing and leaves no stage
behind for good. So a state determines the right action, whatever led to it. That makes the actions good labels for a
policy that sees a single frame, and lets the expert recover from noise on the executed actions. It remembers one thing:
where it means to grasp the bowl (`Plan`), until somebody moves the bowl.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import mujoco
import numpy as np
from scipy.spatial.transform import Rotation

from contracts import BadInput

# Stages, in the order of an episode without disturbances.
REACH = "reach"  # fly to the rim, through a funnel above it; go up as long as the fingers are not open
CLOSE = "close"  # shut the fingers around the rim
CARRY = "carry"  # fly to the target, through a funnel above it
RELEASE = "release"  # open the fingers
RETREAT = "retreat"  # go up, away from the bowl on its target

# An error of 25 mm or more gives MAX_MOVE, which moves the hand 10 mm an env step. It is below full action, so that the
# noise on it (workshop/noisy_episode.py) is hardly ever clipped.
GAIN_PER_M = 32.0
MAX_MOVE = 0.8
GAIN_PER_RAD = 2.4
MAX_TURN = 0.5  # share of the rotation's full action: 0.07 rad an env step

# Flying: at most HOVER_M above the goal, down a funnel around it.
HOVER_M = 0.10
FUNNEL_M = 0.010  # horizontal error within which the hand, or the bowl in it, may come all the way down
SLOPE = 2.2  # of the funnel's wall: m of height per m of distance
# Heights below the funnel's wall: at the first, sideways motion begins to slow down; at the second it stops.
CLIMB_FIRST_M = (0.02, 0.05)
TURN_AS_DISTANCE_M = 0.1  # per rad: a hand that still has to turn counts as being this far away

# Grasping. The opening is the distance between the finger joints, 0.077 m at most.
OPEN_M = 0.070
SHUT_M = 0.030
STALLED_M_S = 0.02  # fingers close faster than this (at 0.2) unless something is between them
ALIGNED_M = 0.008  # horizontal error within which the fingers may begin to close
REACHED_M = 0.012  # vertical error within which they may
NEAR_M = 0.030  # error up to which they go on closing
MOVED_M = 0.008  # a bowl further than this from its planned place has been moved
SLIPPED_M = 0.045  # a bowl further than this from its place in the hand is lost, not merely turned
ON_TARGET_M = 0.025  # largest horizontal distance of a bowl that is on its target
PLATE_HEIGHT_M = 0.015  # largest height of a bowl above a plate on which it stands
REGION_HEIGHT_M = 0.035  # and above the middle of a region, such as a stove's burner or a cabinet's top

# Orientation of the grip site when the hand points down at yaw 0.
DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])

# Where to take the bowl by its rim.
RIM_RADIUS_M = 0.048  # of LIBERO's black bowl, to the middle of its slanted wall where the fingertips hold it
# Height of the grip site above the bowl's origin: the fingertips reach 2 cm below the rim's edge.
RIM_HEIGHT_M = 0.040
YAWS_DEG = (0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75, 90)  # the arm starts at 0
# Horizontal distance from the robot's base. Beyond it the elbow straightens and the controller loses the arm.
REACH_M = 0.74
TURN_PER_REACH = 60.0  # turning the hand by so many rad is worth reaching 1 m less far
# Preference for the left side, so that millimetres do not decide where both sides are about as near.
SIDE_BIAS_M = 0.03
CLEARANCE_M = 0.006


@dataclass(frozen=True)
class State:
    """What the expert looks at. World frame, m, rad, s."""

    eef: np.ndarray  # (3,) grip site between the fingertips
    rotation: np.ndarray  # (3, 3) of the grip site
    opening: float  # distance between the finger joints
    opening_speed: float
    bowl: np.ndarray  # (3,)
    target: np.ndarray  # (3,) plate, or middle of the region, where the bowl is to go
    is_on_target: bool  # whether the bowl is there


@dataclass(frozen=True)
class Plan:
    """A rim grasp of the bowl, made for the place where it stood."""

    bowl: np.ndarray  # (3,) m
    yaw: float  # rad, of the hand about the vertical
    offset: np.ndarray  # (3,) m, from the bowl's origin to the grip site


class Expert:
    """Acts in the episode that runs in `domain` (LIBERO's BDDLBaseDomain); one per episode.

    Raises BadInput for tasks other than putting a black bowl onto a plate or a region.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._bowl, self._target = bowl_and_target(domain.parsed_problem["goal_state"])
        self._plan: Plan | None = None
        self.stage = ""  # of the last decision

    def decide(self) -> np.ndarray:
        """The action (7,), in [-1, 1], for the present state."""
        state = self.look()
        if self._plan is None or must_plan_again(state, self._plan):
            self._plan = plan_grasp(self._domain.sim, self._domain.obj_body_id[self._bowl], state.eef)
        self.stage = stage_of(state, self._plan)
        return action_of(self.stage, state, self._plan)

    def look(self) -> State:
        """The present state, read from the simulation."""
        data = self._domain.sim.data
        robot = self._domain.robots[0]
        body_ids = self._domain.obj_body_id
        bowl = data.body_xpos[body_ids[self._bowl]].copy()
        if self._target in body_ids:
            target = data.body_xpos[body_ids[self._target]].copy()
            height_m = PLATE_HEIGHT_M
        else:
            target = data.get_site_xpos(self._target).copy()
            height_m = REGION_HEIGHT_M
        is_near = np.linalg.norm((target - bowl)[:2]) < ON_TARGET_M
        return State(
            eef=data.get_site_xpos("gripper0_grip_site").copy(),
            rotation=data.get_site_xmat("gripper0_grip_site").copy(),
            opening=float(np.abs(data.qpos[robot._ref_gripper_joint_pos_indexes]).sum()),
            opening_speed=float(data.qvel[robot._ref_gripper_joint_vel_indexes] @ [1.0, -1.0]),
            bowl=bowl,
            target=target,
            is_on_target=bool(is_near and bowl[2] - target[2] < height_m),
        )


def bowl_and_target(goal_state: list[list[str]]) -> tuple[str, str]:
    """The names of the bowl and of what it goes onto, in the goal of a BDDL file. Raises BadInput for other goals."""
    if len(goal_state) == 1 and len(goal_state[0]) == 3:
        predicate, bowl, target = goal_state[0]
        is_known = target.startswith(("plate", "flat_stove", "wooden_cabinet"))
        if predicate == "on" and bowl.startswith("akita_black_bowl") and is_known:
            return bowl, target
    raise BadInput(
        "the scripted expert only puts a black bowl onto a plate, a stove or a cabinet (all tasks of libero_spatial; "
        f"tasks 1, 4 and 8 of libero_goal); this task's goal is {goal_state}: choose other --task-ids"
    )


def must_plan_again(state: State, plan: Plan) -> bool:
    """True if the bowl stands, or falls, elsewhere than planned and is not in the hand."""
    is_moved = np.linalg.norm(state.bowl - plan.bowl) > MOVED_M
    return bool(is_moved and state.opening > SHUT_M)


def stage_of(state: State, plan: Plan) -> str:
    """What to do next: a function of the present state and the plan."""
    if _is_held(state, plan):
        return RELEASE if state.is_on_target else CARRY
    if state.is_on_target:
        return RETREAT
    sideways, vertical = _grasp_errors(state, plan)
    if state.opening > OPEN_M:
        closes = sideways < ALIGNED_M and vertical < REACHED_M
    else:  # the fingers are on their way
        closes = state.opening_speed < 0 and max(sideways, vertical) < NEAR_M
    return CLOSE if closes else REACH


def _is_held(state: State, plan: Plan) -> bool:
    """Whether the bowl is between the fingers: they are shut around it, or have shut and lifted it."""
    is_near = np.linalg.norm(state.eef - state.bowl - plan.offset) < SLIPPED_M
    is_shut = state.opening < SHUT_M
    is_stalled = state.opening_speed > -STALLED_M_S
    is_lifted = state.bowl[2] > plan.bowl[2] + MOVED_M
    return bool(is_near and is_shut and (is_stalled or is_lifted))


def action_of(stage: str, state: State, plan: Plan) -> np.ndarray:
    """The action (7,) of a stage: it moves the hand, or the bowl in it, towards where the stage wants it."""
    move = _position_error(stage, state, plan) * GAIN_PER_M
    turn = np.clip(_turn_error(state, plan) * GAIN_PER_RAD, -MAX_TURN, MAX_TURN)
    gripper = 1.0 if stage in (CLOSE, CARRY) else -1.0
    slowdown = max(1.0, np.abs(move).max() / MAX_MOVE)
    return np.concatenate([move / slowdown, turn, [gripper]])


def _position_error(stage: str, state: State, plan: Plan) -> np.ndarray:
    """From where the hand, or the bowl in it, is to where the stage wants it, (3,) m."""
    to_grasp = state.bowl + plan.offset - state.eef
    to_target = state.target - state.bowl
    if stage == CLOSE:
        return to_grasp
    if stage == CARRY:
        top = HOVER_M + max(0.0, plan.bowl[2] - state.target[2])
        return _down_funnel(to_target, float(np.linalg.norm(to_target[:2])), top)
    if stage == RELEASE:
        return np.zeros(3)
    if stage == REACH and state.opening > OPEN_M:
        sideways, _ = _grasp_errors(state, plan)
        return _down_funnel(to_grasp, sideways, HOVER_M)
    return np.array([0.0, 0.0, HOVER_M])


def _grasp_errors(state: State, plan: Plan) -> tuple[float, float]:
    """How far the hand is from where it grasps, m: sideways (its turn included), and vertically."""
    error = state.bowl + plan.offset - state.eef
    turn = TURN_AS_DISTANCE_M * np.linalg.norm(_turn_error(state, plan))
    return float(max(np.linalg.norm(error[:2]), turn)), float(abs(error[2]))


def _turn_error(state: State, plan: Plan) -> np.ndarray:
    """Rotation vector (3,) from the present orientation to the planned one: the hand upright at the grasp's yaw."""
    planned = Rotation.from_euler("z", plan.yaw).as_matrix() @ DOWN
    return Rotation.from_matrix(planned @ state.rotation.T).as_rotvec()


def _down_funnel(error: np.ndarray, sideways: float, top: float) -> np.ndarray:
    """The error (3,) to a point above the goal: as high as the funnel is at the distance `sideways`, at most `top`.

    From below the funnel the way leads up first, and sideways only near its wall.
    """
    climb = error[2] + np.clip(SLOPE * (sideways - FUNNEL_M), 0.0, top)
    slow_from, stop_at = CLIMB_FIRST_M
    slowdown = np.clip((climb - slow_from) / (stop_at - slow_from), 0.0, 1.0)
    return np.array([*(error[:2] * (1.0 - slowdown)), climb])


def plan_grasp(sim: Any, bowl_body: int, eef: np.ndarray) -> Plan:
    """The rim grasp with the fewest collisions; among equals the least turn and stretch, then the side near the hand.

    sim: robosuite's simulation. `bowl_body` is a body's id; `eef` (3,) is the position of the grip site.
    """
    model = sim.model._model
    data = sim.data._data
    boxes = find_boxes(model, bowl_body)
    base = sim.data.get_body_xpos("robot0_base")
    bowl = data.xpos[bowl_body].copy()
    height = np.array([0.0, 0.0, RIM_HEIGHT_M])
    plans = [
        Plan(bowl, yaw, side * RIM_RADIUS_M * _finger_axis(yaw) + height)
        for yaw, side in product(np.radians(YAWS_DEG), (-1.0, 1.0))
    ]

    def cost(plan: Plan) -> tuple[int, float, float]:
        """Tuples compare by the first number that differs."""
        place = plan.bowl + plan.offset
        num_hits = count_hits(place + _hand_points(plan.yaw), model, data, boxes)
        stretch_m = max(0.0, float(np.linalg.norm((place - base)[:2])) - REACH_M)
        is_left = plan.offset @ _finger_axis(plan.yaw) > 0
        distance_m = float(np.linalg.norm(place - eef)) - SIDE_BIAS_M * is_left
        return num_hits, abs(plan.yaw) + TURN_PER_REACH * stretch_m, distance_m

    return min(plans, key=cost)


def find_boxes(model: mujoco.MjModel, bowl_body: int) -> np.ndarray:
    """The ids of the boxes by which LIBERO's scenes collide, without those of the robot and of the bowl itself."""
    robot_bodies = [
        body for body in range(model.nbody) if model.body(body).name.startswith(("robot", "gripper", "mount"))
    ]
    is_colliding_box = (model.geom_contype != 0) & (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX)
    is_ignored = np.isin(model.geom_bodyid, [*robot_bodies, bowl_body])
    return np.flatnonzero(is_colliding_box & ~is_ignored)


def count_hits(points: np.ndarray, model: mujoco.MjModel, data: mujoco.MjData, boxes: np.ndarray) -> int:
    """How often one of the points (P, 3) lies in a box or closer to it than CLEARANCE_M."""
    from_centres = points[:, None] - data.geom_xpos[boxes]
    in_box_frames = np.einsum("nbi,bij->nbj", from_centres, data.geom_xmat[boxes].reshape(-1, 3, 3))
    return int((np.abs(in_box_frames) < model.geom_size[boxes] + CLEARANCE_M).all(axis=-1).sum())


def _finger_axis(yaw: float) -> np.ndarray:
    """The direction (3,) in which the fingers open, one inside the bowl and one outside."""
    return np.array([-np.sin(yaw), np.cos(yaw), 0.0])


def _hand_points(yaw: float) -> np.ndarray:
    """(N, 3) points of the open gripper about its grip site: two fingers, and the hand above them."""
    fingers = product((-0.05, -0.04, 0.04, 0.05), (-0.012, 0.0, 0.012), (-0.012, 0.0, 0.03))
    hand = product((-0.10, -0.05, 0.0, 0.05, 0.10), (-0.03, 0.0, 0.03), (0.07,))
    across_axis = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    axes = np.stack([_finger_axis(yaw), across_axis, [0.0, 0.0, 1.0]])
    return np.array([*fingers, *hand]) @ axes
