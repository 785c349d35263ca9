"""A scripted expert that moves LIBERO's black bowl onto the plate, from the simulation's true state.

Every env step it decides afresh what to do, from the present state alone (`State`): no counters, no stages that are
left behind. So a state says what the right action is, whatever led there: that makes its actions fit as labels for a
policy that sees one frame, and lets it recover from noise on the executed actions. The one thing that it keeps is
where it means to take the bowl (`Plan`), until somebody moves the bowl.

    hover    fly to the rim, by way of a funnel above it; with fingers that aren't open, go up
    descend  the last centimetres straight down
    close    shut the fingers around the rim
    lift     straight up
    carry    fly to the plate, by way of a funnel above it
    lower    the last centimetres straight down
    release  open the fingers
    retreat  go up, away from the bowl on the plate
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from envs.grasp import Grasp, choose_grasp
from errors import BadInput

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
OPEN, CLOSE = -1.0, 1.0


class Stage(Enum):
    HOVER = "hover"
    DESCEND = "descend"
    CLOSE = "close"
    LIFT = "lift"
    CARRY = "carry"
    LOWER = "lower"
    RELEASE = "release"
    RETREAT = "retreat"


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
    bowl: np.ndarray  # (3,) where the bowl stood
    grasp: Grasp


class Expert:
    """Acts in the episode that runs in `domain` (LIBERO's BDDLBaseDomain); one per episode."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._bowl, self._plate = _bowl_and_plate(domain)
        self._plan: Plan | None = None

    def act(self) -> np.ndarray:
        """Action (7,) in [-1, 1] for the present state."""
        return self.decide()[1]

    def decide(self) -> tuple[Stage, np.ndarray]:
        state = self.look()
        if self._plan is None or _was_moved(state, self._plan):
            self._plan = Plan(state.bowl, self._choose_grasp(state))
        stage = stage_of(state, self._plan)
        return stage, action_of(stage, state, self._plan)

    def look(self) -> State:
        data = self._domain.sim.data
        fingers = self._domain.robots[0]._ref_gripper_joint_pos_indexes
        finger_speeds = self._domain.robots[0]._ref_gripper_joint_vel_indexes
        return State(
            eef=data.get_site_xpos("gripper0_grip_site").copy(),
            rotation=data.get_site_xmat("gripper0_grip_site").copy(),
            opening=float(np.abs(data.qpos[fingers]).sum()),
            opening_speed=float(data.qvel[finger_speeds] @ [1.0, -1.0]),
            bowl=self._position(self._bowl),
            plate=self._position(self._plate),
        )

    def _position(self, name: str) -> np.ndarray:
        return self._domain.sim.data.body_xpos[self._domain.obj_body_id[name]].copy()

    def _choose_grasp(self, state: State) -> Grasp:
        sim = self._domain.sim
        body, base = self._domain.obj_body_id[self._bowl], sim.data.get_body_xpos("robot0_base")
        return choose_grasp(sim.model._model, sim.data._data, body, state.eef, base)


def _bowl_and_plate(domain: Any) -> tuple[str, str]:
    goals = domain.parsed_problem["goal_state"]
    predicate, moved, target = goals[0] if len(goals) == 1 and len(goals[0]) == 3 else ("", "", "")
    if predicate != "on" or not moved.startswith("akita_black_bowl") or not target.startswith("plate"):
        raise BadInput(f"the scripted expert only puts a black bowl onto a plate; this task's goal is {goals}")
    return moved, target


def _was_moved(state: State, plan: Plan) -> bool:
    """The bowl stands, or falls, elsewhere than was planned for, and is not in the hand."""
    return bool(np.linalg.norm(state.bowl - plan.bowl) > MOVED_M and state.opening > SHUT_M)


def _is_held(state: State, plan: Plan) -> bool:
    is_near = np.linalg.norm(state.eef - state.bowl - plan.grasp.offset) < SLIPPED_M
    is_lifted = state.bowl[2] > plan.bowl[2] + MOVED_M
    has_stalled = state.opening_speed > -STALLED_M_S
    return bool(is_near and state.opening < SHUT_M and (has_stalled or is_lifted))


def stage_of(state: State, plan: Plan) -> Stage:
    """What there is to do; a function of the present state and the plan."""
    to_plate = np.linalg.norm((state.plate - state.bowl)[:2])
    is_on_plate = to_plate < ON_PLATE_M[0] and state.bowl[2] - state.plate[2] < ON_PLATE_M[1]
    if _is_held(state, plan):
        if is_on_plate:
            return Stage.RELEASE
        if to_plate < FUNNEL_M:
            return Stage.LOWER
        is_away = np.linalg.norm((state.bowl - plan.bowl)[:2]) > FUNNEL_M
        return Stage.CARRY if is_away else Stage.LIFT
    if is_on_plate:
        return Stage.RETREAT
    aside, away = _misses(state, plan)
    if state.opening <= OPEN_M:  # the fingers are on their way
        return Stage.CLOSE if state.opening_speed < 0 and max(aside, away) < NEAR_M else Stage.HOVER
    if aside < ALIGNED_M and away < REACHED_M:
        return Stage.CLOSE
    return Stage.DESCEND if aside < FUNNEL_M else Stage.HOVER


def _misses(state: State, plan: Plan) -> tuple[float, float]:
    """How far the hand is from the grasp's place: sideways (its turn included), and above it or below it."""
    error = state.bowl + plan.grasp.offset - state.eef
    turn = TURN_AS_DISTANCE_M * np.linalg.norm(_turn(state, plan))
    return float(max(np.linalg.norm(error[:2]), turn)), float(abs(error[2]))


def _turn(state: State, plan: Plan) -> np.ndarray:
    """Rotation vector (3,) from the present orientation to that of the plan: the hand upright at the grasp's yaw."""
    wanted = Rotation.from_euler("z", plan.grasp.yaw).as_matrix() @ DOWN
    return Rotation.from_matrix(wanted @ state.rotation.T).as_rotvec()


def action_of(stage: Stage, state: State, plan: Plan) -> np.ndarray:
    """The action (7,) of a stage: towards where the hand, or the bowl in it, shall be."""
    upwards = np.array([0.0, 0.0, HOVER_M])
    if stage in (Stage.HOVER, Stage.DESCEND):
        aside, _ = _misses(state, plan)
        to_grasp = state.bowl + plan.grasp.offset - state.eef
        error = _down_funnel(to_grasp, aside, HOVER_M) if state.opening > OPEN_M else upwards
    elif stage is Stage.CLOSE:
        error = state.bowl + plan.grasp.offset - state.eef
    elif stage in (Stage.LIFT, Stage.CARRY, Stage.LOWER):
        to_plate = state.plate - state.bowl
        top = HOVER_M + max(0.0, plan.bowl[2] - state.plate[2])
        error = _down_funnel(to_plate, float(np.linalg.norm(to_plate[:2])), top)
    else:
        error = upwards if stage is Stage.RETREAT else np.zeros(3)
    move = error * GAIN_PER_M
    turn = np.clip(_turn(state, plan) * GAIN_PER_RAD, -MAX_TURN, MAX_TURN)
    gripper = OPEN if stage in (Stage.HOVER, Stage.DESCEND, Stage.RELEASE, Stage.RETREAT) else CLOSE
    return np.concatenate([move / max(1.0, np.abs(move).max()), turn, [gripper]])


def _down_funnel(error: np.ndarray, aside: float, top: float) -> np.ndarray:
    """The error (3,) to a point above the goal: as high as the funnel is at the distance `aside`, at most `top`.

    From below the funnel the way leads up first, sideways only near its wall.
    """
    climb = error[2] + np.clip(SLOPE * (aside - FUNNEL_M), 0.0, top)
    return np.array([*(error[:2] * (1.0 - _ramp(climb, *CLIMB_FIRST_M))), climb])


def _ramp(x: float, start: float, end: float) -> float:
    """0 up to `start`, 1 from `end` on, linear between them."""
    return float(np.clip((x - start) / (end - start), 0.0, 1.0))
