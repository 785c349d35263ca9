"""Compute what robosuite's controller computes, to the last bit, with a quarter of its Python.

Every matrix product has the operands, the order and the memory layout of the original: with another layout NumPy would
choose another BLAS routine, and the last bits would differ. Import this module after calling
`envs.libero_imports.prepare_imports`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mujoco
import numpy as np
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain


class LeanController:
    """Replaces `_pre_action` of a domain for one episode; the next reset makes a new controller.

    Names and limits are looked up once an episode, and the Jacobian is computed once a physics step instead of four
    times. It supports only what LIBERO uses: one Panda arm, and OSC_POSE control with fixed impedance, uncoupled,
    without interpolation.
    """

    def __init__(self, domain: BDDLBaseDomain) -> None:
        self._sim = domain.sim
        robot = domain.robots[0]
        self._model = self._sim.model._model
        self._data = self._sim.data._data
        self._osc = robot.controller  # robosuite's OperationalSpaceController
        self._gripper = robot.gripper
        self._site = self._sim.model.site_name2id(self._osc.eef_name)
        self._joints = self._osc.qpos_index
        self._motions = self._osc.qvel_index
        self._jacobian_pos = np.zeros((3, self._model.nv))
        self._jacobian_ori = np.zeros((3, self._model.nv))
        self._mass_matrix = np.zeros((self._model.nv, self._model.nv))
        self._arm = robot._ref_joint_actuator_indexes
        self._fingers = robot._ref_joint_gripper_actuator_indexes
        self._arm_low, self._arm_high = self._model.actuator_ctrlrange[self._arm].T
        fingers_low, fingers_high = self._model.actuator_ctrlrange[self._fingers].T
        self._fingers_middle = 0.5 * (fingers_high + fingers_low)
        self._fingers_reach = 0.5 * (fingers_high - fingers_low)
        self._osc.update = self._measure  # robosuite's own `set_goal` calls `update`

    def __call__(self, action: np.ndarray, policy_step: bool = False) -> None:
        """Write the motor commands of one physics step; `policy_step` says that `action` (7,) is a new one."""
        osc = self._osc
        data = self._data
        if policy_step:
            osc.set_goal(action[:6])
        self._measure()
        osc.new_update = True  # so that the next physics step measures again
        data.ctrl[self._arm] = np.clip(self._torques(), self._arm_low, self._arm_high)
        fingers = self._gripper.format_action(action[6:])
        data.ctrl[self._fingers] = self._fingers_middle + self._fingers_reach * fingers

    def _measure(self) -> None:
        """Read positions, velocities, Jacobians and masses of hand and arm, as robosuite's Controller.update does."""
        osc = self._osc
        model = self._model
        data = self._data
        if not osc.new_update:
            return
        self._sim.forward()
        osc.ee_pos = data.site_xpos[self._site].copy()
        osc.ee_ori_mat = data.site_xmat[self._site].reshape(3, 3).copy()
        mujoco.mj_jacSite(model, data, self._jacobian_pos, self._jacobian_ori, self._site)
        osc.ee_pos_vel = np.dot(self._jacobian_pos, data.qvel)
        osc.ee_ori_vel = np.dot(self._jacobian_ori, data.qvel)
        osc.joint_pos = data.qpos[self._joints]
        osc.joint_vel = data.qvel[self._motions]
        osc.J_pos = self._jacobian_pos[:, self._motions]
        osc.J_ori = self._jacobian_ori[:, self._motions]
        osc.J_full = np.concatenate([osc.J_pos, osc.J_ori])
        mujoco.mj_fullM(model, self._mass_matrix, data.qM)
        osc.mass_matrix = self._mass_matrix[self._motions, :][:, self._motions]
        osc.new_update = False

    def _torques(self) -> np.ndarray:
        """Torques (7,) of operational space control, as in OperationalSpaceController.run_controller."""
        osc = self._osc
        force = (osc.goal_pos - osc.ee_pos) * osc.kp[:3] + -osc.ee_pos_vel * osc.kd[:3]
        torque = orientation_error(osc.goal_ori, osc.ee_ori_mat) * osc.kp[3:6] + -osc.ee_ori_vel * osc.kd[3:6]
        _, lambda_pos, lambda_ori, nullspace = opspace_matrices(
            osc.mass_matrix, osc.J_full, osc.J_pos, osc.J_ori
        )
        wrench = np.concatenate([np.dot(lambda_pos, force), np.dot(lambda_ori, torque)])
        at_rest = nullspace_torques(
            osc.mass_matrix, nullspace, osc.initial_joint, osc.joint_pos, osc.joint_vel
        )
        return np.dot(osc.J_full.T, wrench) + self._data.qfrc_bias[self._motions] + at_rest
