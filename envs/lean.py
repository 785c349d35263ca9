"""Exact speed-ups of LIBERO's env: the same numbers and pixels for a fraction of the work.

Everything here changes single instances, never a class or module of robosuite or LIBERO, so that LIBERO's own env can
run beside ours; tests/test_libero.py compares the two bit for bit. `domain` is LIBERO's env under its wrapper
(`BDDLBaseDomain`, built with hard_reset=False).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mujoco
import numpy as np

from envs.lean_control import lean_control
from envs.view import only_what_is_in_view

PROPRIO_OBSERVABLES = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")


@contextmanager
def lean_physics(sim: Any) -> Iterator[None]:
    """Within this block `sim` (MjSim) computes positions and velocities once a physics step, not three times.

    robosuite calls mj_forward at the start of a step, again in its controller, and then mj_step, which begins with the
    same computation once more. Only the last stage, the constraint forces, has to be repeated: each solution is the
    start of the next (`qacc_warmstart`), so leaving one out would change the last bits of the trajectory.
    """
    model, data = sim.model._model, sim.data._data
    is_fresh = False  # positions and velocities belong to the current state

    def forward() -> None:
        nonlocal is_fresh
        if is_fresh:
            mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_VEL, 1)
        else:
            mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_NONE, 1)  # without sensors: nobody reads them
        is_fresh = True

    def step(with_udd: bool = True) -> None:
        nonlocal is_fresh
        if is_fresh:
            mujoco.mj_step2(model, data)
        else:
            mujoco.mj_step(model, data)
        is_fresh = False

    sim.forward, sim.step = forward, step
    try:
        yield
    finally:
        del sim.forward, sim.step  # the methods of the class show through again


class CameraGate:
    """Makes the image observables of a domain render only the cameras that are `wanted`, and only what they see.

    The observables stay enabled: they are sampled at the same physics step as LIBERO's. Disabling them instead would
    shift their clock and so give other images. An image that is not wanted is a black one.
    """

    def __init__(self, domain: Any) -> None:
        self.wanted: tuple[str, ...] = ()
        self.seconds = 0.0  # spent rendering so far
        self._domain = domain
        for camera, height, width in zip(domain.camera_names, domain.camera_heights, domain.camera_widths, strict=True):
            observable = domain._observables[f"{camera}_image"]
            black = np.zeros((height, width, 3), np.uint8)
            observable._sensor = self._gated(camera, observable._sensor, black)

    def _gated(self, camera: str, render: Callable, black: np.ndarray) -> Callable:
        def sensor(obs_cache: dict) -> np.ndarray:
            if camera not in self.wanted:
                return black
            started = time.perf_counter()
            # robosuite makes a context current once, when it is made: with two envs in a process the later one's.
            sim = self._domain.sim
            sim._render_context_offscreen.gl_ctx.make_current()
            with only_what_is_in_view(sim.model._model, sim.data._data, sim.model.camera_name2id(camera)):
                image = render(obs_cache)
            self.seconds += time.perf_counter() - started
            return image

        # robosuite keeps its marks on functions
        sensor.__modality__ = render.__modality__  # type: ignore[attr-defined]
        return sensor


def drop_unread_observables(domain: Any) -> None:
    """Keep the observables that make an Observation; those of objects and joints are never read."""
    kept = (*PROPRIO_OBSERVABLES, *(f"{camera}_image" for camera in domain.camera_names))
    domain._observables = {name: domain._observables[name] for name in kept}


class SoftReset:
    """Resets a domain without rebuilding its model (0.1 s instead of 1 s), with the outcome of LIBERO's hard reset.

    Four things of the past would survive robosuite's own soft reset: where the fixtures stood, the gripper's last
    command, and by way of `qacc_warmstart` the number and the states of the forward passes that a hard reset makes.
    """

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        as_loaded = mujoco.MjModel.from_xml_string(domain.model.get_xml())  # the sim's model has placed fixtures
        self._body_pos, self._body_quat = as_loaded.body_pos.copy(), as_loaded.body_quat.copy()
        domain.sim.reset = self._reset_data
        # LIBERO appends these samplers (open drawers, lit stoves) once more whenever it loads the model. After one hard
        # reset there are two of each, and the second draw shifts the random numbers of all that is placed after it.
        domain.object_property_initializers *= 2

    def __call__(self) -> None:
        gripper = self._domain.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)
        self._domain.reset()
        self._domain._pre_action = lean_control(self._domain)

    def _reset_data(self) -> None:
        """In place of MjSim.reset: what loading the model afresh and making a renderer for it would leave."""
        sim = self._domain.sim
        sim.model.body_pos[:], sim.model.body_quat[:] = self._body_pos, self._body_quat
        mujoco.mj_resetData(sim.model._model, sim.data._data)
        sim.forward()
        sim.forward()
