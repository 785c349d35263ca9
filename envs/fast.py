"""Physics for training, two to four times as fast: 13 physics steps an env step, with one constraint solution each.

robosuite takes 25 and solves the constraints three times in each, every solution starting from the one before. Here
they are solved once, as MuJoCo's documentation has it for controllers (mj_step1, control, mj_step2), and the controller
is compiled. While objects settle, 25 physics steps keep the same equations, with other rounding; then longer ones, with
contacts nearly as stiff, move the hand about a millimetre otherwise in a chunk. Import after `envs.rendering.prepare`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import mujoco
import numpy as np
from numba import njit

JOINT_KP = 10.0  # of robosuite's pull towards the initial joints, critically damped
OBSERVED_S = (
    0.046  # how much of an env step has passed where robosuite's clocks, started in the reset, observe
)
WITHOUT_SENSORS = int(mujoco.mjtDisableBit.mjDSBL_SENSOR)  # nobody reads them
# MuJoCo gives no contact a time constant below two physics steps, in exact physics 4 ms. Of 13 physics steps two are
# 7.7 ms: so soft that the hand lifts a ramekin with the bowl on it. With 4 ms they let bowls at rest jump.
AS_STIFF, CONTACT_S = int(mujoco.mjtDisableBit.mjDSBL_REFSAFE), 0.0055


@njit(cache=True)
def osc_torques(hand: tuple, arm: tuple, goal: tuple) -> np.ndarray:
    """Torques (7,) of robosuite's OperationalSpaceController (uncoupled), with solutions in place of inverses.

    `hand`: position (3,), rotation (3, 3), Jacobians (3, 7) of both. `arm`: positions, velocities, bias (7,), masses
    (7, 7). `goal`: position (3,), rotation (3, 3), joints (7,), stiffness (6,), damping (6,).
    """
    position, rotation, jacobian_pos, jacobian_ori = hand
    joints, velocity, bias, masses = arm
    goal_position, goal_rotation, goal_joints, kp, kd = goal
    mass, jacobian = masses.copy(), np.concatenate((jacobian_pos, jacobian_ori))
    error = np.zeros(6)
    for i in range(3):
        error[i] = goal_position[i] - position[i]
        j, k = (i + 1) % 3, (i + 2) % 3
        for axis in range(3):  # half the sum of the axes' cross products
            error[3 + i] += 0.5 * (
                rotation[j, axis] * goal_rotation[k, axis] - rotation[k, axis] * goal_rotation[j, axis]
            )
    force = kp * error - kd * (jacobian @ velocity)
    pull = (
        JOINT_KP * (goal_joints - joints) - 2.0 * np.sqrt(JOINT_KP) * velocity
    )  # rad/s^2; the hand shall not feel it
    mobility = jacobian @ np.linalg.solve(mass, np.ascontiguousarray(jacobian.T))  # (6, 6): J M^-1 J^T
    uncoupled = mobility.copy()
    uncoupled[:3, 3:] = uncoupled[3:, :3] = 0.0
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


def fast_step(domain: Any, substeps: int) -> Callable[[np.ndarray], tuple[Mapping[str, np.ndarray], bool]]:
    """`domain.step` in `substeps` physics steps, for the episode that runs: an action (7,) to observations and success.

    What robosuite's and LIBERO's `step` do, for what LIBERO uses (`envs.lean.lean_control`). The next reset makes a new
    controller, and needs a new one of these.
    """
    sim, robot = domain.sim, domain.robots[0]
    model, data = sim.model._model, sim.data._data
    c, gripper = robot.controller, robot.gripper
    site, arm = sim.model.site_name2id(c.eef_name), slice(c.qvel_index[0], c.qvel_index[-1] + 1)
    position, rotation = data.site_xpos[site], data.site_xmat[site].reshape(3, 3)  # like the following, views
    joints, velocity, bias = (
        data.qpos[c.qpos_index[0] : c.qpos_index[-1] + 1],
        data.qvel[arm],
        data.qfrc_bias[arm],
    )
    jacobian_pos, jacobian_ori = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    mass_matrix = np.zeros((model.nv, model.nv))
    hand_state = position, rotation, jacobian_pos[:, arm], jacobian_ori[:, arm]
    arm_state = joints, velocity, bias, mass_matrix[arm, arm]
    first, last = robot._ref_joint_actuator_indexes[0], robot._ref_joint_gripper_actuator_indexes[-1]
    motors, limits = data.ctrl[first : last + 1], model.actuator_ctrlrange[first : last + 1]
    middle, reach = limits[7:].mean(axis=1), np.ptp(limits[7:], axis=1) / 2
    model.opt.timestep = domain.control_timestep / substeps
    durations = model.opt.timestep / domain.model_timestep * (1 + np.arange(substeps))[:, None]  # so far
    observed = round(OBSERVED_S / model.opt.timestep)
    disabled = WITHOUT_SENSORS
    if model.opt.timestep > domain.model_timestep:
        disabled, times = disabled | AS_STIFF, model.geom_solref[:, 0]
        times[(times > 0) & (times < CONTACT_S)] = CONTACT_S

    def goal() -> tuple[np.ndarray, ...]:
        return c.goal_pos, c.goal_ori, c.initial_joint, c.kp, c.kd

    def measure() -> None:
        mujoco.mj_jacSite(model, data, jacobian_pos, jacobian_ori, site)
        mujoco.mj_fullM(model, mass_matrix, data.qM)

    measure()
    command(
        motors.copy(), limits, np.zeros(2), hand_state, arm_state, goal()
    )  # compiled: a reset may take its time

    def step(action: np.ndarray) -> tuple[Mapping[str, np.ndarray], bool]:
        domain.timestep += 1
        closing = gripper.speed * np.array([-1.0, 1.0]) * np.sign(action[6])
        fingers = np.clip(gripper.current_action + durations * closing, -1.0, 1.0)
        gripper.current_action = fingers[-1]
        model.opt.disableflags |= disabled
        for substep, finger_commands in enumerate(middle + reach * fingers):
            mujoco.mj_step1(model, data)
            if substep == 0:
                c.ee_pos, c.ee_ori_mat, c.new_update = position.copy(), rotation.copy(), False
                c.set_goal(action[:6])
            measure()
            command(motors, limits, finger_commands, hand_state, arm_state, goal())
            mujoco.mj_step2(model, data)
            if substep == observed:
                domain._update_observables(force=True)
        model.opt.disableflags &= ~disabled
        c.new_update = True
        domain.cur_time += domain.control_timestep
        domain._post_action(action)
        return domain._get_observations(), bool(domain._check_success())

    return step
