"""LIBERO's own env, built without its side effects and driven one env step at a time."""

import difflib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from envs.bddl import read_problem
from envs.egl import choose_egl_device
from envs.observation import IMAGE_SIZE
from envs.setup import egl_device, prepare
from envs.tasks import libero_root
from errors import BadInput

LOG = logging.getLogger(__name__)
MAX_PLACEMENT_TRIES = 100
ARENA_CATEGORIES = ("table", "floor", "kitchen_table", "coffee_table", "living_room_table", "study_table")  # no objects
T = TypeVar("T")


class SimulatorFault(Exception):
    """The simulation went wrong by itself: not the policy's failure and not the user's."""


def _first_placement(attempt: Callable[[], T], seed: int) -> T:
    """Repeat `attempt` until LIBERO's sampler finds room for all objects, as LIBERO's own reset does.

    LIBERO draws from numpy's global generator: seeded here, and given back to the rest of the program afterwards.
    """
    from robosuite.utils.errors import RandomizationError

    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        for _ in range(MAX_PLACEMENT_TRIES):
            with suppress(RandomizationError):
                return attempt()
    finally:
        np.random.set_state(state)  # noqa: NPY002
    raise SimulatorFault(f"LIBERO found no placement of the objects in {MAX_PLACEMENT_TRIES} tries")


class Simulator:
    """One built task. Building takes seconds; a fault makes it worthless: close it and build another one."""

    def __init__(
        self, bddl: Path, assets: Path, cameras: Sequence[str], render_backend: str | None, render_gpu: int | None
    ) -> None:
        backend = prepare(render_backend)
        with egl_device(choose_egl_device(render_gpu) if backend == "egl" else 0):
            self._wrapper = _build_libero(bddl, assets, list(cameras))
        from envs.lean import (
            CameraGate,
            SoftReset,
            drop_unread_observables,
        )  # needs mujoco, whose import `prepare` precedes

        self._domain = self._wrapper.env
        self.gate = CameraGate(self._domain)
        self._soft_reset = SoftReset(self._domain)
        drop_unread_observables(self._domain)
        self._domain.reward = lambda action: 0.0  # LIBERO's costs a second check of success, which nobody reads

    def reset(self, seed: int) -> None:
        """Reset everything; the places of cabinet, stove and other fixtures become a function of `seed` alone."""
        self.gate.wanted = ()
        _first_placement(self._soft_reset, seed)

    def set_state(self, state: np.ndarray) -> None:
        """Set time, positions and velocities, `state` (1 + nq + nv,)."""
        model = self._domain.sim.model
        if len(state) != 1 + model.nq + model.nv:
            raise BadInput(
                f"an initial state of {len(state)} numbers does not fit the model of {1 + model.nq + model.nv}: the "
                'asset folder belongs to another version of LIBERO; use "lowpoly" or "official"'
            )
        self._wrapper.set_init_state(state)

    def step(self, action: np.ndarray, wanted: Sequence[str] = ()) -> tuple[dict[str, np.ndarray], bool]:
        """One env step (25 physics steps); renders the `wanted` cameras. Returns LIBERO's observations, success."""
        from envs.lean import lean_physics

        self.gate.wanted = tuple(wanted)
        if wanted:
            self._make_gl_current()
        with lean_physics(self._domain.sim):
            raw, _, success, _ = self._domain.step(action)
        self._check_health()
        return raw, bool(success)

    @property
    def domain(self) -> Any:
        """LIBERO's env under its wrapper (`BDDLBaseDomain`): the simulation's true state, for experts and tests."""
        return self._domain

    def _check_health(self) -> None:
        """MuJoCo resets a state that has become NaN or huge and only leaves a warning behind."""
        import mujoco

        data = self._domain.sim.data._data
        kinds = mujoco.mjtWarning
        for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC, kinds.mjWARN_BADCTRL):
            if data.warning[kind].number:
                raise SimulatorFault(f"the simulation became unstable ({kind.name})")

    def close(self) -> None:
        """Free the GL context while its display still exists, else the interpreter's exit is full of EGLError."""
        self._make_gl_current()
        self._wrapper.close()

    def _make_gl_current(self) -> None:
        """robosuite draws into, and deletes from, whichever GL context is current: with several envs in a process, the
        wrong one."""
        self._domain.sim._render_context_offscreen.gl_ctx.make_current()


def _build_libero(bddl: Path, assets: Path, cameras: list[str]) -> Any:
    import libero.libero
    import mujoco
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    # Without a handler MuJoCo writes its warnings into MUJOCO_LOG.TXT in the current folder.
    mujoco.set_mju_user_warning(lambda message: LOG.warning("mujoco: %s", message))
    other_assets = libero.libero._assets_path_cache  # hf-libero ignores its config file here
    libero.libero._assets_path_cache = str(assets)
    is_own = not bddl.is_relative_to(libero_root())
    if is_own:
        _check_categories(bddl)
    try:
        wrapper = _first_placement(
            lambda: OffScreenRenderEnv(
                bddl_file_name=str(bddl),
                camera_names=cameras,
                camera_heights=IMAGE_SIZE,
                camera_widths=IMAGE_SIZE,
                hard_reset=False,
                ignore_done=True,  # the step limit is the episode's, see envs.libero
            ),
            seed=0,
        )
        if is_own:
            wrapper.env._check_success()  # a goal that LIBERO cannot evaluate would end every episode in an error
        return wrapper
    except (OSError, ValueError) as fault:
        raise BadInput(f"LIBERO cannot load {bddl.stem} with the assets of {assets}: {fault}") from fault
    except (
        Exception
    ) as fault:  # what LIBERO makes of a mistake that envs.bddl cannot see: a KeyError, an assertion, ...
        if not is_own:
            raise
        raise BadInput(
            f"LIBERO cannot build {bddl} ({type(fault).__name__}: {fault}): look at the regions that :init and :goal "
            "name (do the objects have them, is there room?) and compare with one of LIBERO's own files"
        ) from fault
    finally:
        libero.libero._assets_path_cache = other_assets


def _check_categories(bddl: Path) -> None:
    """Raise BadInput for an object that LIBERO does not know; which it knows is only known once it is imported."""
    from libero.libero.envs.objects import get_object_dict

    known = {*get_object_dict(), *ARENA_CATEGORIES}
    for category in read_problem(bddl).categories:
        if category not in known:
            near = difflib.get_close_matches(category, known, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(sorted(known))}"
            raise BadInput(f"BDDL file {bddl}: LIBERO has no object {category}; {hint}")
