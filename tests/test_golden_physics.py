"""Our envs on the low-poly pack against stored trajectories of LIBERO's own loop and assets, from the moment after
settling. That ours are LIBERO's on one pack, to the bit, is in test_libero.py.

tests/golden/physics was made with mujoco 3.3.0, without a renderer, and with the SkylakeX kernels of numpy's OpenBLAS.
With other kernels 79 of 80 trajectories stayed within 1e-9, and one came to 7e-4: a contact amplifies the last bit.
"""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.libero_simulator import SETTLING_STEPS

GOLDEN = Path(__file__).parent / "golden" / "physics"
# Of libero_10 every task has a scene of its own, of the others all have one.
TASKS = {
    "libero_spatial": (0, 5),
    "libero_object": (0, 5),
    "libero_goal": (0, 8),
    "libero_10": (0, 1, 3, 5, 8),
}
SETTLED_TOLERANCE, LATER_TOLERANCE = 1e-9, 1e-3  # with other kernels than the golden data's


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
def test_trajectories_are_those_of_the_official_assets(suite, task_id):
    golden = np.load(GOLDEN / f"{suite}.npz")
    env = LiberoEnv(EnvSpec(suite, (task_id,), num_images=1, assets="lowpoly"), task_id)
    assert golden[f"t{task_id}_name"] == env.name
    rows = []
    for action in (None, *golden[f"t{task_id}_actions"]):
        result = env.reset(Start(0), False) if action is None else env.step_chunk(action[None], False)
        data, hand = env.domain.sim.data, env._episode.raw["robot0_eef_pos"]
        rows.append((data.qpos.copy(), data.qvel.copy(), hand, result.success))
    columns = {"body_pos": env.domain.sim.model.body_pos.copy()}
    columns |= zip(
        ("qpos", "qvel", "eef_pos", "success"), map(np.array, zip(*rows, strict=True)), strict=True
    )
    assert list(env.domain.sim.model.body_names) == list(golden[f"t{task_id}_i0_body_names"])
    env.close()

    for name, ours in columns.items():
        official = golden[f"t{task_id}_i0_{name}"]
        official = official if name == "body_pos" else official[SETTLING_STEPS:]
        if blas_kernels() == "SkylakeX" or name == "success":
            np.testing.assert_array_equal(ours, official, err_msg=name)
        else:
            settled = slice(None) if name == "body_pos" else slice(1)
            np.testing.assert_allclose(ours[settled], official[settled], rtol=0, atol=SETTLED_TOLERANCE)
            np.testing.assert_allclose(ours, official, rtol=0, atol=LATER_TOLERANCE, err_msg=name)
