"""LIBERO's own loop, as published: what our envs must repeat to the bit."""

from dataclasses import dataclass

import numpy as np
import pytest

from envs.assets import find_pack, installed_official
from envs.env import EnvSpec
from envs.libero import CAMERAS, task_files
from envs.libero_imports import prepare_imports
from envs.libero_simulator import SETTLING_ACTION, SETTLING_STEPS
from envs.tasks import load_init_states

needs_official = pytest.mark.skipif(
    installed_official() is None, reason="LIBERO's own meshes are not installed (make venv ASSETS=none)"
)


@dataclass
class Snapshot:
    state: np.ndarray  # qpos, qvel and where the constraint solver starts next
    proprio: np.ndarray  # (8,)
    images: np.ndarray | None  # (2, 256, 256, 3)
    success: bool


def state_of(domain) -> np.ndarray:
    data = domain.sim.data._data
    return np.concatenate([data.qpos, data.qvel, data.qacc_warmstart])


def build_libero(suite, task_id, assets, draws, seed):
    """LIBERO's own env of a task after its first reset, with its own cameras or without any."""
    prepare_imports()
    import libero.libero
    from libero.libero.envs.env_wrapper import OffScreenRenderEnv

    bddl = task_files(EnvSpec(suite, (task_id,)), task_id).bddl
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libero.libero, "_assets_path_cache", str(find_pack(assets).folder))
        env = OffScreenRenderEnv(
            bddl_file_name=str(bddl), camera_heights=256, camera_widths=256, use_camera_obs=draws
        )
        env.seed(seed)
        env.reset()  # loads the model anew, from the same assets
    return env


def libero_rollout(suite, task_id, init_state, actions, frames_every=0, assets="lowpoly", seed=0):
    """The published protocol: seed, reset, set the initial state, settle, one action at a time; returns snapshots.

    The first one is of the moment after settling. Initial state None: as the seed places everything. Frames are those
    of LIBERO's own cameras: of the first snapshot and of every `frames_every`-th (0: of none).
    """
    env = build_libero(suite, task_id, assets, frames_every > 0, seed)
    from robosuite.utils.transform_utils import quat2axisangle

    if init_state is None:
        init_state = env.get_sim_state()
        init_state[1:8] += np.random.default_rng(seed).normal(0, 0.02, 7)
    env.set_init_state(init_state)
    render = env.env.sim.render
    snapshots = []
    for count, action in enumerate([SETTLING_ACTION] * SETTLING_STEPS + list(actions), 1 - SETTLING_STEPS):
        is_drawn = frames_every > 0 and count >= 0 and count % frames_every == 0
        env.env.sim.render = render if is_drawn else lambda **_: np.zeros((256, 256, 3), np.uint8)
        raw, _, success, _ = env.step(action)
        images = np.stack([np.rot90(raw[f"{camera}_image"], 2) for camera in CAMERAS]) if is_drawn else None
        rotation = quat2axisangle(raw["robot0_eef_quat"].copy())
        proprio = np.concatenate([raw["robot0_eef_pos"], rotation, raw["robot0_gripper_qpos"]])
        snapshots.append(Snapshot(state_of(env.env), proprio, images, bool(success)))
    env.close()
    return snapshots[SETTLING_STEPS - 1 :]


def stored_state(suite, task_id, index):
    return load_init_states(task_files(EnvSpec(suite, (task_id,)), task_id).init_states)[index]
