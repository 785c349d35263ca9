"""Send MuJoCo's warnings to our log, and raise an error when a simulation is unstable.

mujoco is imported only inside functions, because `envs.libero_imports.prepare_imports` has to be called before.
"""

import logging
from functools import partial
from typing import Any

from envs.env import SimulatorFault

log = logging.getLogger(__name__)


def log_mujoco_warnings() -> None:
    """Send MuJoCo's warnings to our log. Otherwise MuJoCo writes MUJOCO_LOG.TXT into the current folder."""
    import mujoco

    mujoco.set_mju_user_warning(partial(log.warning, "mujoco: %s"))


def check_stability(data: Any) -> None:
    """Raise SimulatorFault if the simulation of an `MjData` has become unstable.

    MuJoCo itself resets a state that has become NaN or huge, and only counts a warning.
    """
    import mujoco

    kinds = mujoco.mjtWarning
    for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC, kinds.mjWARN_BADCTRL):
        if data.warning[kind].number:
            raise SimulatorFault(f"the simulation became unstable ({kind.name})")
