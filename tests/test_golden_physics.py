"""LIBERO on the low-poly pack against stored trajectories of LIBERO's own assets. That ours are LIBERO's on one pack,
to the bit, is in test_libero.py.

tests/golden/physics was made with mujoco 3.3.0, without a renderer, and with the SkylakeX kernels of numpy's OpenBLAS.
With other kernels 79 of 80 trajectories stayed within 1e-9, and one came to 7e-4: a contact amplifies the last bit.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from envs.assets import find_pack
from envs.libero_imports import prepare_imports
from envs.libero_simulator import SETTLING_ACTION, SETTLING_STEPS
from envs.tasks import load_init_states, suite_task

GOLDEN = Path(__file__).parent / "golden" / "physics"
# Of libero_10 every task has a scene of its own, of the others all have one.
TASKS = {
    "libero_spatial": (0, 5),
    "libero_object": (0, 5),
    "libero_goal": (0, 8),
    "libero_10": (0, 1, 3, 5, 8),
}
SETTLING_TOLERANCE, LATER_TOLERANCE = 1e-9, 1e-3  # with other kernels than the golden data's


def blas_kernels() -> str:
    """What OpenBLAS calls the processor whose kernels it uses; empty where numpy comes with another BLAS."""
    for library in Path(np.__file__).parent.parent.glob("numpy.libs/libscipy_openblas*"):
        name = ctypes.CDLL(str(library)).scipy_openblas_get_corename64_
        name.restype = ctypes.c_char_p
        return name().decode()
    return ""


@pytest.mark.parametrize(
    ("suite", "task_id"), [(suite, task_id) for suite, ids in TASKS.items() for task_id in ids]
)
def test_trajectories_are_those_of_the_official_assets(suite, task_id, monkeypatch):
    golden = np.load(GOLDEN / f"{suite}.npz")
    case, task = f"t{task_id}_i0_", suite_task(suite, task_id)
    assert golden[f"t{task_id}_name"] == task.name
    prepare_imports()
    import libero.libero
    from libero.libero.envs.env_wrapper import ControlEnv

    monkeypatch.setattr(libero.libero, "_assets_path_cache", str(find_pack("lowpoly").folder))
    env = ControlEnv(str(task.bddl), use_camera_obs=False, has_offscreen_renderer=False, ignore_done=True)
    env.seed(0)
    env.reset()
    seen = env.set_init_state(load_init_states(task.init_states)[0])
    rows = [(env.sim.data.qpos.copy(), env.sim.data.qvel.copy(), seen["robot0_eef_pos"], False)]
    for action in [SETTLING_ACTION] * SETTLING_STEPS + list(golden[f"t{task_id}_actions"]):
        seen, _, success, _ = env.step(action)
        rows.append((env.sim.data.qpos.copy(), env.sim.data.qvel.copy(), seen["robot0_eef_pos"], success))
    assert list(env.sim.model.body_names) == list(golden[case + "body_names"])
    columns = dict(
        zip(("qpos", "qvel", "eef_pos", "success"), map(np.array, zip(*rows, strict=True)), strict=True)
    )
    columns["body_pos"] = env.sim.model.body_pos.copy()
    env.close()

    for name, ours in columns.items():
        official = golden[case + name]
        if blas_kernels() == "SkylakeX" or name == "success":
            np.testing.assert_array_equal(ours, official, err_msg=name)
        else:
            settling = slice(None) if name == "body_pos" else slice(0, SETTLING_STEPS + 1)
            np.testing.assert_allclose(ours[settling], official[settling], rtol=0, atol=SETTLING_TOLERANCE)
            np.testing.assert_allclose(ours, official, rtol=0, atol=LATER_TOLERANCE, err_msg=name)
