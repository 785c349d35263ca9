"""A scripted expert that moves LIBERO's black bowl onto the plate, from the simulation's true state.

Every env step it decides afresh what to do, from the present state alone (`State`): no counters, no stages that are
left behind. So a state says what the right action is, whatever led there: that makes its actions fit as labels for a
policy that sees one frame, and lets it recover from noise on the executed actions. The one thing that it keeps is
where it means to take the bowl (`Plan`), until somebody moves the bowl.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import mujoco
import numpy as np
from scipy.spatial.transform import Rotation

from contracts import BadInput

# Stages, in the order of an episode without disturbances.
HOVER = "hover"  # fly to the rim, by way of a funnel above it; with fingers that aren't open, go up
DESCEND = "descend"  # the last centimetres straight down
CLOSE = "close"  # shut the fingers around the rim
LIFT = "lift"  # straight up
CARRY = "carry"  # fly to the plate, by way of a funnel above it
LOWER = "lower"  # the last centimetres straight down
RELEASE = "release"  # open the fingers
RETREAT = "retreat"  # go up, away from the bowl on the plate

GAIN_PER_M = 40.0  # full action, which moves the eef 13 mm an env step, from an error of 25 mm on
GAIN_PER_RAD = 2.4
MAX_TURN = 0.5  # of the rotation's full action: 0.07 rad an env step

# Flying: at most HOVER_M above the goal, down a funnel around it.
HOVER_M = 0.10
FUNNEL_M = 0.010  # horizontal error at which the hand, or the bowl in it, may come all the way down
SLOPE = 2.2  # of the funnel's wall: m of height per m of distance
CLIMB_FIRST_M = (0.02, 0.05)  # below the wall: where sideways motion gets slower, and where it stops
TURN_AS_DISTANCE_M = 0.1  # per rad: a hand that is not yet turned is not yet there

# Grasping. The opening is the distance of the finger joints, 0.077 m at most.
OPEN_M = 0.070
SHUT_M = 0.030
STALLED_M_S = 0.02  # closing fingers are faster (0.2) unless something is between them
ALIGNED_M = 0.008  # horizontal error at which the fingers may begin to close
REACHED_M = 0.012  # vertical
NEAR_M = 0.030  # error at which closing goes on
MOVED_M = 0.008  # of the bowl, from where it stood
SLIPPED_M = 0.045  # a bowl that is further from its place in the hand is lost, not just turned there
ON_PLATE_M = (0.025, 0.015)  # horizontal distance and height of the bowl on the plate
DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])  # orientation of the grip site at yaw 0

# Where to take the bowl by its rim.
RIM_RADIUS_M = (
    0.048  # of LIBERO's black bowl, to the middle of its slanted wall at the depth of the fingertips
)
RIM_HEIGHT_M = (
    0.040  # of the grip site above the bowl's origin: the fingertips reach 2 cm below the rim's edge
)
YAWS_DEG = (0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75, 90)  # the arm starts at 0
REACH_M = (
    0.74  # horizontal, from the robot's base: beyond, the elbow straightens and the controller loses the arm
)
TURN_PER_REACH = 60.0  # rad that are worth turning the hand to reach 1 m less far
SIDE_BIAS_M = 0.03  # to the left side, lest millimetres decide where both are about as near
CLEARANCE_M = 0.006


@dataclass(frozen=True)
class State:
    """What the expert looks at. World frame, m, rad, s."""

    eef: np.ndarray  # (3,) grip site between the fingertips
    rotation: np.ndarray  # (3, 3) of the grip site
    opening: float  # distance of the finger joints
    opening_speed: float
    bowl: np.ndarray  # (3,)
    plate: np.ndarray  # (3,)


@dataclass(frozen=True)
class Plan:
    """A rim grasp of the bowl, made for the place where it stood."""

    bowl: np.ndarray  # (3,) m
    yaw: float  # rad, of the hand about the vertical
    offset: np.ndarray  # (3,) m, from the bowl's origin to the grip site


class Expert:
    """Acts in the episode that runs in `domain` (LIBERO's BDDLBaseDomain); one per episode."""

    def __init__(self, domain: Any) -> None:
        goals = domain.parsed_problem["goal_state"]
        predicate, moved, target = goals[0] if len(goals) == 1 and len(goals[0]) == 3 else ("", "", "")
        if predicate != "on" or not moved.startswith("akita_black_bowl") or not target.startswith("plate"):
            raise BadInput(
                f"the scripted expert only puts a black bowl onto a plate; this task's goal is {goals}"
            )
        self._domain, self._bowl, self._plate = domain, moved, target
        self._plan: Plan | None = None

    def decide(self) -> tuple[str, np.ndarray]:
        """Stage and action (7,), in [-1, 1], for the present state."""
        state = self.look()
        # A bowl that stands, or falls, elsewhere than was planned for, and is not in the hand: plan again.
        was_moved = self._plan is not None and np.linalg.norm(state.bowl - self._plan.bowl) > MOVED_M
        if self._plan is None or (was_moved and state.opening > SHUT_M):
            sim, body = self._domain.sim, self._domain.obj_body_id[self._bowl]
            base = sim.data.get_body_xpos("robot0_base")
            self._plan = plan_grasp(sim.model._model, sim.data._data, body, state.eef, base)
        stage = stage_of(state, self._plan)
        return stage, action_of(stage, state, self._plan)

    def look(self) -> State:
        data, robot, bodies = self._domain.sim.data, self._domain.robots[0], self._domain.obj_body_id
        return State(
            eef=data.get_site_xpos("gripper0_grip_site").copy(),
            rotation=data.get_site_xmat("gripper0_grip_site").copy(),
            opening=float(np.abs(data.qpos[robot._ref_gripper_joint_pos_indexes]).sum()),
            opening_speed=float(data.qvel[robot._ref_gripper_joint_vel_indexes] @ [1.0, -1.0]),
            bowl=data.body_xpos[bodies[self._bowl]].copy(),
            plate=data.body_xpos[bodies[self._plate]].copy(),
        )


def stage_of(state: State, plan: Plan) -> str:
    """What there is to do; a function of the present state and the plan."""
    to_plate = np.linalg.norm((state.plate - state.bowl)[:2])
    is_on_plate = to_plate < ON_PLATE_M[0] and state.bowl[2] - state.plate[2] < ON_PLATE_M[1]
    is_near = np.linalg.norm(state.eef - state.bowl - plan.offset) < SLIPPED_M
    is_lifted = state.bowl[2] > plan.bowl[2] + MOVED_M
    if (
        is_near and state.opening < SHUT_M and (state.opening_speed > -STALLED_M_S or is_lifted)
    ):  # the bowl is held
        if is_on_plate:
            return RELEASE
        if to_plate < FUNNEL_M:
            return LOWER
        return CARRY if np.linalg.norm((state.bowl - plan.bowl)[:2]) > FUNNEL_M else LIFT
    if is_on_plate:
        return RETREAT
    aside, away = _misses(state, plan)
    if state.opening <= OPEN_M:  # the fingers are on their way
        return CLOSE if state.opening_speed < 0 and max(aside, away) < NEAR_M else HOVER
    if aside < ALIGNED_M and away < REACHED_M:
        return CLOSE
    return DESCEND if aside < FUNNEL_M else HOVER


def action_of(stage: str, state: State, plan: Plan) -> np.ndarray:
    """The action (7,) of a stage: towards where the hand, or the bowl in it, shall be."""
    upwards = np.array([0.0, 0.0, HOVER_M])
    to_grasp, to_plate = state.bowl + plan.offset - state.eef, state.plate - state.bowl
    if stage in (HOVER, DESCEND):
        aside, _ = _misses(state, plan)
        error = _down_funnel(to_grasp, aside, HOVER_M) if state.opening > OPEN_M else upwards
    elif stage == CLOSE:
        error = to_grasp
    elif stage in (LIFT, CARRY, LOWER):
        top = HOVER_M + max(0.0, plan.bowl[2] - state.plate[2])
        error = _down_funnel(to_plate, float(np.linalg.norm(to_plate[:2])), top)
    else:
        error = upwards if stage == RETREAT else np.zeros(3)
    move = error * GAIN_PER_M
    turn = np.clip(_turn(state, plan) * GAIN_PER_RAD, -MAX_TURN, MAX_TURN)
    gripper = -1.0 if stage in (HOVER, DESCEND, RELEASE, RETREAT) else 1.0  # open, or close
    return np.concatenate([move / max(1.0, np.abs(move).max()), turn, [gripper]])


def _misses(state: State, plan: Plan) -> tuple[float, float]:
    """How far the hand is from the grasp's place: sideways (its turn included), and above it or below it."""
    error = state.bowl + plan.offset - state.eef
    turn = TURN_AS_DISTANCE_M * np.linalg.norm(_turn(state, plan))
    return float(max(np.linalg.norm(error[:2]), turn)), float(abs(error[2]))


def _turn(state: State, plan: Plan) -> np.ndarray:
    """Rotation vector (3,) from the present orientation to that of the plan: the hand upright at the grasp's yaw."""
    wanted = Rotation.from_euler("z", plan.yaw).as_matrix() @ DOWN
    return Rotation.from_matrix(wanted @ state.rotation.T).as_rotvec()


def _down_funnel(error: np.ndarray, aside: float, top: float) -> np.ndarray:
    """The error (3,) to a point above the goal: as high as the funnel is at the distance `aside`, at most `top`.

    From below the funnel the way leads up first, sideways only near its wall.
    """
    climb = error[2] + np.clip(SLOPE * (aside - FUNNEL_M), 0.0, top)
    start, end = CLIMB_FIRST_M
    return np.array([*(error[:2] * (1.0 - np.clip((climb - start) / (end - start), 0.0, 1.0))), climb])


def plan_grasp(
    model: mujoco.MjModel, data: mujoco.MjData, bowl: int, eef: np.ndarray, base: np.ndarray
) -> Plan:
    """The rim grasp with the fewest collisions; among equals the least turn and stretch, then the side near the hand.

    `bowl` is a body's id, `eef` and `base` (3,) are the positions of the grip site and of the robot's base.
    """
    # LIBERO's scenes collide by boxes; those of the robot and of the bowl itself are not in the way.
    robot = [b for b in range(model.nbody) if model.body(b).name.startswith(("robot", "gripper", "mount"))]
    is_obstacle = (model.geom_contype != 0) & (model.geom_type == mujoco.mjtGeom.mjGEOM_BOX)
    boxes = np.flatnonzero(is_obstacle & ~np.isin(model.geom_bodyid, [*robot, bowl]))
    height = np.array([0.0, 0.0, RIM_HEIGHT_M])

    def cost(plan: Plan) -> tuple[int, float, float]:
        place = plan.bowl + plan.offset
        points = (place + _hand_points(plan.yaw))[:, None] - data.geom_xpos[boxes]
        in_box = np.einsum("nbi,bij->nbj", points, data.geom_xmat[boxes].reshape(-1, 3, 3))
        hits = int((np.abs(in_box) < model.geom_size[boxes] + CLEARANCE_M).all(axis=-1).sum())
        stretch = max(0.0, float(np.linalg.norm((place - base)[:2])) - REACH_M)
        bias = SIDE_BIAS_M * (plan.offset @ _finger_axis(plan.yaw) > 0)
        return hits, abs(plan.yaw) + TURN_PER_REACH * stretch, float(np.linalg.norm(place - eef)) - bias

    rim = product(np.radians(YAWS_DEG), (-1.0, 1.0))
    where = data.xpos[bowl].copy()
    return min(
        (Plan(where, yaw, side * RIM_RADIUS_M * _finger_axis(yaw) + height) for yaw, side in rim), key=cost
    )


def _finger_axis(yaw: float) -> np.ndarray:
    """The fingers open along it, one inside the bowl and one outside."""
    return np.array([-np.sin(yaw), np.cos(yaw), 0.0])


def _hand_points(yaw: float) -> np.ndarray:
    """(N, 3) points of the open gripper about its grip site: two fingers, and the hand above them."""
    fingers = product((-0.05, -0.04, 0.04, 0.05), (-0.012, 0.0, 0.012), (-0.012, 0.0, 0.03))
    hand = product((-0.10, -0.05, 0.0, 0.05, 0.10), (-0.03, 0.0, 0.03), (0.07,))
    along, across, up = np.array([*fingers, *hand]).T
    sideways = np.array([np.cos(yaw), np.sin(yaw), 0.0])
    return along[:, None] * _finger_axis(yaw) + across[:, None] * sideways + up[:, None] * [0.0, 0.0, 1.0]
