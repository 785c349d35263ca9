"""What becomes of MuJoCo's warnings: they go to our log, and an unstable simulation is a fault.

Import mujoco only inside functions: `envs.rendering.prepare` has to come first.
"""

import logging
from typing import Any

from envs.env import SimulatorFault

log = logging.getLogger(__name__)


def log_mujoco_warnings() -> None:
    """Without a handler MuJoCo writes its warnings into MUJOCO_LOG.TXT in the current folder."""
    import mujoco

    mujoco.set_mju_user_warning(_log_warning)


def _log_warning(message: str) -> None:
    log.warning("mujoco: %s", message)


def check_stability(data: Any) -> None:
    """Look for instability in an `MjData`: MuJoCo resets a state that has become NaN or huge, and only warns.

    Raises SimulatorFault.
    """
    import mujoco

    kinds = mujoco.mjtWarning
    for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC, kinds.mjWARN_BADCTRL):
        if data.warning[kind].number:
            raise SimulatorFault(f"the simulation became unstable ({kind.name})")
