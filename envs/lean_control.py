"""The robot's controller with the numbers of robosuite's and a quarter of its Python.

robosuite (SingleArm.control, OperationalSpaceController) looks up names and limits and computes the same Jacobian four
times in each of the 25 physics steps of an env step. Here they are looked up once an episode, and the Jacobian is
computed once a physics step. Every product has the operands, the order and the memory layout of the original: another
layout would choose another BLAS routine and so other last bits.
"""

from collections.abc import Callable
from typing import Any

import mujoco
import numpy as np
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error


def lean_control(domain: Any) -> Callable[[np.ndarray, bool], None]:
    """A function to stand in for the `_pre_action` of `domain`, until its next reset makes a new controller.

    It knows what LIBERO uses: one Panda arm, OSC_POSE control with fixed impedance, uncoupled, no interpolation. The
    histories of poses and forces that robosuite keeps beside (`recent_...`) are not kept; nobody reads them.
    """
    sim, robot = domain.sim, domain.robots[0]
    model, data = sim.model._model, sim.data._data
    controller, gripper = robot.controller, robot.gripper
    measure = _measurement(controller, sim)
    controller.update = measure  # also for set_goal, which stays robosuite's

    arm, fingers = robot._ref_joint_actuator_indexes, robot._ref_joint_gripper_actuator_indexes
    arm_low, arm_high = model.actuator_ctrlrange[arm].T
    fingers_low, fingers_high = model.actuator_ctrlrange[fingers].T
    fingers_middle, fingers_reach = 0.5 * (fingers_high + fingers_low), 0.5 * (fingers_high - fingers_low)

    def control(action: np.ndarray, policy_step: bool = False) -> None:
        """Write the motor commands of one physics step; `action` (7,) is new when `policy_step` is true."""
        if policy_step:
            controller.set_goal(action[:6])
        measure()
        controller.new_update = True  # the next physics step measures anew
        data.ctrl[arm] = np.clip(_torques(controller, data), arm_low, arm_high)
        data.ctrl[fingers] = fingers_middle + fingers_reach * gripper.format_action(action[6:])

    return control


def _measurement(controller: Any, sim: Any) -> Callable[[], None]:
    """robosuite's Controller.update: where the hand and the arm are, and how they answer to forces."""
    model, data = sim.model._model, sim.data._data
    site = sim.model.site_name2id(controller.eef_name)
    positions, velocities = controller.qpos_index, controller.qvel_index
    jacobian_pos, jacobian_ori = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    mass_matrix = np.zeros((model.nv, model.nv))

    def measure() -> None:
        if not controller.new_update:
            return
        sim.forward()
        controller.ee_pos = data.site_xpos[site].copy()
        controller.ee_ori_mat = data.site_xmat[site].reshape(3, 3).copy()
        mujoco.mj_jacSite(model, data, jacobian_pos, jacobian_ori, site)
        controller.ee_pos_vel = np.dot(jacobian_pos, data.qvel)
        controller.ee_ori_vel = np.dot(jacobian_ori, data.qvel)
        controller.joint_pos, controller.joint_vel = data.qpos[positions], data.qvel[velocities]
        controller.J_pos, controller.J_ori = jacobian_pos[:, velocities], jacobian_ori[:, velocities]
        controller.J_full = np.concatenate([controller.J_pos, controller.J_ori])
        mujoco.mj_fullM(model, mass_matrix, data.qM)
        controller.mass_matrix = mass_matrix[velocities, :][:, velocities]
        controller.new_update = False

    return measure


def _torques(controller: Any, data: Any) -> np.ndarray:
    """Torques (7,) of operational space control, as in OperationalSpaceController.run_controller."""
    c = controller
    force = (c.goal_pos - c.ee_pos) * c.kp[:3] + -c.ee_pos_vel * c.kd[:3]
    torque = orientation_error(c.goal_ori, c.ee_ori_mat) * c.kp[3:6] + -c.ee_ori_vel * c.kd[3:6]
    _, lambda_pos, lambda_ori, nullspace = opspace_matrices(c.mass_matrix, c.J_full, c.J_pos, c.J_ori)
    wrench = np.concatenate([np.dot(lambda_pos, force), np.dot(lambda_ori, torque)])
    against_gravity = data.qfrc_bias[c.qvel_index]
    at_rest = nullspace_torques(c.mass_matrix, nullspace, c.initial_joint, c.joint_pos, c.joint_vel)
    return np.dot(c.J_full.T, wrench) + against_gravity + at_rest
