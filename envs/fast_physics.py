"""Simulate faster for training: 13 physics steps an env step, each with one constraint solution.

This is two to four times as fast as robosuite, which makes 25 physics steps and solves the constraints three times in
each, every solution starting from the one before. Here they are solved once, in the order that MuJoCo's documentation
recommends for controllers (mj_step1, control, mj_step2), and the controller is compiled. While objects settle there are
25 physics steps, too: the same equations, rounded differently. Afterwards the steps are longer and the contacts nearly
as stiff; after a chunk the hand is then about a millimetre from where exact physics would have it. Import this module
after calling `envs.libero_imports.prepare_imports`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import mujoco
import numpy as np
from numba import njit

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain
    from robosuite.robots import SingleArm

JOINT_KP = 10.0  # stiffness (1/s^2) of robosuite's critically damped pull towards the initial joints
# Seconds after the start of an env step at which robosuite observes. Its clocks start in the reset.
OBSERVED_S = 0.046
WITHOUT_SENSORS = int(mujoco.mjtDisableBit.mjDSBL_SENSOR)  # nobody reads them
# MuJoCo raises the time constant of a contact to at least two physics steps, which are 4 ms in exact physics. With 13
# physics steps two are 7.7 ms: contacts so soft that the hand lifts a ramekin together with the bowl on it. With 4 ms
# bowls at rest jump. So the limit is switched off, and CONTACT_S is the least time constant.
WITHOUT_LIMIT_OF_STIFFNESS = int(mujoco.mjtDisableBit.mjDSBL_REFSAFE)
CONTACT_S = 0.0055


@njit(cache=True)
def osc_torques(hand: tuple, arm: tuple, goal: tuple) -> np.ndarray:
    """Torques (7,) of robosuite's OperationalSpaceController (uncoupled); solves equations instead of inverting.

    hand: position (3,), rotation (3, 3), and the Jacobian (3, 7) of each. arm: joint positions (7,), velocities (7,),
    bias forces (7,), mass matrix (7, 7). goal: position (3,), rotation (3, 3), joint positions (7,), stiffness (6,),
    damping (6,).
    """
    position, rotation, jacobian_pos, jacobian_ori = hand
    joints, velocity, bias, masses = arm
    goal_position, goal_rotation, goal_joints, kp, kd = goal
    mass = masses.copy()
    jacobian = np.concatenate((jacobian_pos, jacobian_ori))
    error = np.zeros(6)
    for i in range(3):
        error[i] = goal_position[i] - position[i]
        j = (i + 1) % 3
        k = (i + 2) % 3
        for axis in range(3):  # the rotation error: half the sum of the cross products of the axes
            error[3 + i] += 0.5 * (
                rotation[j, axis] * goal_rotation[k, axis] - rotation[k, axis] * goal_rotation[j, axis]
            )
    force = kp * error - kd * (jacobian @ velocity)
    # Acceleration (rad/s^2) towards the initial joints; it must not move the hand.
    pull = JOINT_KP * (goal_joints - joints) - 2.0 * np.sqrt(JOINT_KP) * velocity
    mobility = jacobian @ np.linalg.solve(mass, np.ascontiguousarray(jacobian.T))  # (6, 6): J M^-1 J^T
    uncoupled = mobility.copy()
    uncoupled[:3, 3:] = 0.0
    uncoupled[3:, :3] = 0.0
    wrench = np.linalg.solve(uncoupled, force) - np.linalg.solve(mobility, jacobian @ pull)
    return jacobian.T @ wrench + mass @ pull + bias


@njit(cache=True)
def command(
    motors: np.ndarray, limits: np.ndarray, fingers: np.ndarray, hand: tuple, arm: tuple, goal: tuple
) -> None:
    """Write the arm's torques, within `limits` (7, 2), and the fingers' commands (2,) to `motors` (9,)."""
    torques = osc_torques(hand, arm, goal)
    for i in range(7):
        motors[i] = min(max(torques[i], limits[i, 0]), limits[i, 1])
    motors[7:] = fingers


class FastStep:
    """Replaces `domain.step` for the running episode: takes an action (7,), returns observations and success.

    It does what the `step` methods of robosuite and LIBERO do, in `physics_steps` physics steps, and supports only what
    LIBERO uses (see `envs.lean_controller`). Make a new FastStep after every reset, because a reset makes a new
    controller.
    """

    def __init__(self, domain: BDDLBaseDomain, physics_steps: int) -> None:
        self._domain = domain
        robot = domain.robots[0]
        self._model = domain.sim.model._model
        self._data = domain.sim.data._data
        self._osc = robot.controller  # robosuite's OperationalSpaceController
        self._gripper = robot.gripper
        self._look_up_arm()
        self._look_up_motors(robot)
        self._set_time_step(physics_steps)
        self._measure()
        # Compile `command` now, on a copy of the motors: a reset may take longer than a step.
        command(
            self._motors.copy(), self._limits, np.zeros(2), self._hand_state, self._arm_state, self._goal()
        )

    def _look_up_arm(self) -> None:
        """Make views of MuJoCo's arrays that hold the hand and the arm, and arrays for what has to be computed."""
        data = self._data
        nv = self._model.nv
        joints = slice(self._osc.qpos_index[0], self._osc.qpos_index[-1] + 1)
        arm = slice(self._osc.qvel_index[0], self._osc.qvel_index[-1] + 1)
        self._site = self._domain.sim.model.site_name2id(self._osc.eef_name)
        self._position = data.site_xpos[self._site]
        self._rotation = data.site_xmat[self._site].reshape(3, 3)
        self._jacobian_pos = np.zeros((3, nv))
        self._jacobian_ori = np.zeros((3, nv))
        self._mass_matrix = np.zeros((nv, nv))
        self._hand_state = (
            self._position,
            self._rotation,
            self._jacobian_pos[:, arm],
            self._jacobian_ori[:, arm],
        )
        self._arm_state = (
            data.qpos[joints],
            data.qvel[arm],
            data.qfrc_bias[arm],
            self._mass_matrix[arm, arm],
        )

    def _look_up_motors(self, robot: SingleArm) -> None:
        first = robot._ref_joint_actuator_indexes[0]
        last = robot._ref_joint_gripper_actuator_indexes[-1]
        self._motors = self._data.ctrl[first : last + 1]  # (9,): a view
        self._limits = self._model.actuator_ctrlrange[first : last + 1]
        self._fingers_middle = self._limits[7:].mean(axis=1)
        self._fingers_reach = np.ptp(self._limits[7:], axis=1) / 2

    def _set_time_step(self, physics_steps: int) -> None:
        """Set the model's time step; if it is longer than the exact one, keep contacts nearly as stiff."""
        domain = self._domain
        options = self._model.opt
        options.timestep = domain.control_timestep / physics_steps
        # How many exact physics steps would have passed after each of ours, (physics_steps, 1).
        self._elapsed = options.timestep / domain.model_timestep * (1 + np.arange(physics_steps))[:, None]
        self._observed_step = round(OBSERVED_S / options.timestep)
        self._disabled = WITHOUT_SENSORS
        if options.timestep > domain.model_timestep:
            self._disabled |= WITHOUT_LIMIT_OF_STIFFNESS
            times = self._model.geom_solref[:, 0]
            times[(times > 0) & (times < CONTACT_S)] = CONTACT_S

    def __call__(self, action: np.ndarray) -> tuple[Mapping[str, np.ndarray], bool]:
        domain = self._domain
        model = self._model
        data = self._data
        domain.timestep += 1
        commands = self._finger_commands(action[6])
        model.opt.disableflags |= self._disabled
        for physics_step, fingers in enumerate(commands):
            mujoco.mj_step1(model, data)
            if physics_step == 0:
                self._set_goal(action[:6])
            self._measure()
            command(self._motors, self._limits, fingers, self._hand_state, self._arm_state, self._goal())
            mujoco.mj_step2(model, data)
            if physics_step == self._observed_step:
                domain._update_observables(force=True)
        model.opt.disableflags &= ~self._disabled
        self._osc.new_update = True
        domain.cur_time += domain.control_timestep
        domain._post_action(action)
        return domain._get_observations(), bool(domain._check_success())

    def _finger_commands(self, effort: float) -> np.ndarray:
        """The fingers' commands (physics_steps, 2): from the last command on they close or open at constant speed."""
        gripper = self._gripper
        closing = gripper.speed * np.array([-1.0, 1.0]) * np.sign(effort)
        fingers = np.clip(gripper.current_action + self._elapsed * closing, -1.0, 1.0)
        gripper.current_action = fingers[-1]
        return self._fingers_middle + self._fingers_reach * fingers

    def _set_goal(self, motion: np.ndarray) -> None:
        osc = self._osc
        osc.ee_pos = self._position.copy()
        osc.ee_ori_mat = self._rotation.copy()
        osc.new_update = False
        osc.set_goal(motion)

    def _goal(self) -> tuple[np.ndarray, ...]:
        osc = self._osc
        return osc.goal_pos, osc.goal_ori, osc.initial_joint, osc.kp, osc.kd

    def _measure(self) -> None:
        model = self._model
        data = self._data
        mujoco.mj_jacSite(model, data, self._jacobian_pos, self._jacobian_ori, self._site)
        mujoco.mj_fullM(model, self._mass_matrix, data.qM)
