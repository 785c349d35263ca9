"""Check every task of a suite with one asset pack: build it, reset it, load initial states, let them settle, render.

python -m benchmarks.all_tasks                                        # the 40 tasks of the four standard suites
python -m benchmarks.all_tasks --suites libero_90                     # the 90 others
python -m benchmarks.all_tasks --suites all --assets official --states 1     # all 130, official assets, 15 minutes
Prints one line per task. Exit code 1 if an object of any initial state falls off or flies away, or a frame is empty.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from envs.assets import find_pack
from envs.libero import SETTLING_ACTION, SETTLING_STEPS
from envs.rendering import prepare
from envs.tasks import MAX_ENV_STEPS, load_init_states, suite_task, task_names

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
CAMERAS = ("agentview", "robot0_eye_in_hand")

# The initial states hold objects some centimetres (16 at most) above what they come to rest on. A few slide or topple
# when they land: the bottle of KITCHEN_SCENE4 rolls up to 30 cm and stays on the table. That is LIBERO's own physics.
# An object that falls off a table exceeds these bounds by far: it falls more than a metre while the others settle.
MAX_DROP_M = 0.20
MAX_SHIFT_M = 0.40
MAX_SPEED_M_S = 1.0
MIN_CONTRAST = 5.0  # standard deviation of a frame's pixel values, 0..255


@dataclass(frozen=True)
class Settled:
    """What the settling steps did to the objects of one initial state."""

    is_finite: bool
    drop_m: float  # how far any object fell at most; negative if all rose
    shift_m: float  # how far any object moved horizontally at most
    speed_m_s: float  # the highest speed of any object at the end

    @property
    def in_place(self) -> bool:
        return (
            self.is_finite
            and self.drop_m < MAX_DROP_M
            and self.shift_m < MAX_SHIFT_M
            and self.speed_m_s < MAX_SPEED_M_S
        )


def build_env(task_suite: str, task_id: int, assets: Path):
    """Build and reset LIBERO's own env; it renders only when `env.sim.render` is called."""
    prepare()
    import libero.libero
    from libero.libero.envs.env_wrapper import ControlEnv

    libero.libero._assets_path_cache = str(assets)
    env = ControlEnv(
        bddl_file_name=str(suite_task(task_suite, task_id).bddl),
        use_camera_obs=False,
        has_offscreen_renderer=True,
        ignore_done=True,
    )
    env.seed(0)
    env.reset()
    return env


def settle(env, init_state: np.ndarray) -> Settled:
    """Load an initial state (1 + nq + nv,) and make the settling steps; returns what they did to the objects."""
    env.set_init_state(init_state)
    start = object_positions(env)
    for _ in range(SETTLING_STEPS):
        env.step(SETTLING_ACTION)
    shifts = object_positions(env) - start
    joints = [movable.joints[0] for movable in env.env.objects_dict.values()]
    speeds = [np.linalg.norm(env.sim.data.get_joint_qvel(joint)[:3]) for joint in joints]
    return Settled(
        is_finite=bool(np.isfinite(env.sim.data.qpos).all() and np.isfinite(env.sim.data.qvel).all()),
        drop_m=float(np.max(-shifts[:, 2])),
        shift_m=float(np.max(np.linalg.norm(shifts[:, :2], axis=1))),
        speed_m_s=float(np.max(speeds)),
    )


def object_positions(env) -> np.ndarray:
    """World positions (objects, 3) in metres of the movable objects, in the order of the BDDL file."""
    bodies = [env.env.obj_body_id[name] for name in env.env.objects_dict]
    return env.sim.data.body_xpos[bodies]


def frame_ms(env, camera: str, repeats: int = 5) -> float:
    """Milliseconds to render one image of 256x256."""
    env.sim.render(256, 256, camera_name=camera)
    start = time.perf_counter()
    for _ in range(repeats):
        env.sim.render(256, 256, camera_name=camera)
    return (time.perf_counter() - start) / repeats * 1000


def check_task(task_suite: str, task_id: int, assets: Path, num_states: int) -> bool:
    """Check a task and print its line; returns whether all objects stay in place and no frame is empty."""
    start = time.perf_counter()
    env = build_env(task_suite, task_id, assets)
    build_s = time.perf_counter() - start
    task = suite_task(task_suite, task_id)
    settled = [settle(env, state) for state in load_init_states(task.init_states)[:num_states]]
    agentview_ms, wrist_ms = [frame_ms(env, camera) for camera in CAMERAS]
    contrast = min(env.sim.render(256, 256, camera_name=camera).std() for camera in CAMERAS)
    env.close()
    num_in_place = sum(state.in_place for state in settled)
    drop_cm = 100 * max(state.drop_m for state in settled)
    shift_cm = 100 * max(state.shift_m for state in settled)
    speed_cm_s = 100 * max(state.speed_m_s for state in settled)
    print(
        f"{task_suite:15}{task_id:3}  {num_in_place:3}/{len(settled):<3}{drop_cm:7.1f}{shift_cm:7.1f}{speed_cm_s:7.1f}"
        f"{build_s:8.1f}{agentview_ms:8.0f}{wrist_ms:6.0f}{contrast:6.0f}  {task.name[:70]}",
        flush=True,
    )
    return num_in_place == len(settled) and contrast >= MIN_CONTRAST


def main(suites: Sequence[str], assets: str, num_states: int) -> int:
    pack = find_pack(assets)
    print(f"{pack}\nsuite          id  in place drop  shift  speed   build   agent wrist contr  task")
    print("                             cm     cm   cm/s       s      ms    ms   ast")
    tasks = [(suite, task_id) for suite in suites for task_id in range(len(task_names(suite)))]
    results = [check_task(suite, task_id, pack.folder, num_states) for suite, task_id in tasks]
    print(
        f"{sum(results)} of {len(results)} tasks: drawn, and every object of every initial state stays in its place"
    )
    return 0 if all(results) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", choices=[*MAX_ENV_STEPS, "all"], default=SUITES)
    parser.add_argument("--assets", default="lowpoly", help="lowpoly, official or a folder")
    parser.add_argument("--states", type=int, default=50, help="initial states per task")
    arguments = parser.parse_args()
    chosen_suites = list(MAX_ENV_STEPS) if "all" in arguments.suites else arguments.suites
    sys.exit(main(chosen_suites, arguments.assets, arguments.states))
