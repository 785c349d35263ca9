"""Measure env steps per second of one env: LIBERO's own loop against `LiberoEnv.step_chunk`, in one run.

The reference is what the published evaluations do: OffScreenRenderEnv with two 256x256 cameras, one action at a time,
both cameras rendered at every step. Both envs run in this process and execute the same random actions. They take turns
chunk by chunk, so that a busy machine slows both equally. Printed are medians over the chunks.

    python -m benchmarks.env_step --task-suite libero_spatial --task-id 0 --chunks 20
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from command_line import main_guard, parse_flags
from envs.assets import find_pack
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv, task_files
from envs.libero_simulator import SETTLING_ACTION, SETTLING_STEPS
from envs.rendering import prepare_imports, render_device
from envs.tasks import load_init_states
from workshop.demo_files import CHUNK_LENGTH

ACTION_DIM = 7


@dataclass(frozen=True)
class Args:
    task_suite: str = "libero_spatial"
    task_id: int = 0
    chunks: int = 20
    """Chunks of actions that are timed."""
    num_images: int = 2
    """Cameras that step_chunk renders; the reference always renders two."""
    assets: str = "lowpoly"


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def make_reference(spec: EnvSpec, task_id: int):
    """Build the env of the published evaluations."""
    prepare_imports()
    with render_device():
        import libero.libero
        from libero.libero.envs.env_wrapper import OffScreenRenderEnv

        libero.libero._assets_path_cache = str(find_pack(spec.assets).folder)
        bddl = task_files(spec, task_id).bddl
        return OffScreenRenderEnv(bddl_file_name=str(bddl), camera_heights=256, camera_widths=256)


def reset_reference(reference, init_state: np.ndarray) -> None:
    reference.seed(0)
    reference.reset()
    reference.set_init_state(init_state)
    for _ in range(SETTLING_STEPS):
        reference.step(SETTLING_ACTION)


def step_reference(reference, actions: np.ndarray) -> None:
    # robosuite makes a GL context current only when it creates it, but here two envs take turns.
    reference.sim._render_context_offscreen.gl_ctx.make_current()
    for action in actions:
        reference.step(action)


def time_chunks(
    reference, env: LiberoEnv, init_state: np.ndarray, num_chunks: int
) -> tuple[float, float, float]:
    """Let both envs, which have been reset, execute the same random chunks in turns.

    Returns medians of the seconds of a chunk: of the reference, of our env, and of our env's rendering.
    """
    reference_s = []
    env_s = []
    renders_s = []
    generator = np.random.default_rng(0)
    for _ in range(num_chunks):
        actions = generator.uniform(-1, 1, (CHUNK_LENGTH, ACTION_DIM))
        started = time.perf_counter()
        step_reference(reference, actions)
        between = time.perf_counter()
        result = env.step_chunk(actions)
        env_s.append(time.perf_counter() - between)
        reference_s.append(between - started)
        renders_s.append(result.render_s)
        if result.done:
            env.reset(Start(0))
            reset_reference(reference, init_state)
    return median(reference_s), median(env_s), median(renders_s)


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.env_step", description=__doc__)
    spec = EnvSpec(args.task_suite, (args.task_id,), args.num_images, args.assets)
    init_state = load_init_states(task_files(spec, args.task_id).init_states)[0]
    env = LiberoEnv(spec, args.task_id)
    env.reset(Start(0))  # builds the simulator
    reference = make_reference(spec, args.task_id)
    reference_reset_s = seconds_of(lambda: reset_reference(reference, init_state))
    env_reset_s = seconds_of(lambda: env.reset(Start(0)))
    reference_s, env_s, render_s = time_chunks(reference, env, init_state, args.chunks)
    reference.close()
    env.close()

    print(f"{args.task_suite} task {args.task_id}, {find_pack(args.assets)}, {args.chunks} chunks")
    print_row("LIBERO's loop, 2 cameras each step", reference_s, reference_reset_s)
    print_row(f"step_chunk, {args.num_images} camera(s) each chunk", env_s, env_reset_s)
    print(f"ratio {reference_s / env_s:.2f}; of step_chunk {render_s / env_s:.0%} is rendering")


def print_row(name: str, chunk_s: float, reset_s: float) -> None:
    print(
        f"{name:36}{CHUNK_LENGTH / chunk_s:7.1f} env steps/s, {1000 * chunk_s:.1f} ms a chunk, reset {reset_s:.2f} s"
    )


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.env_step", main))
