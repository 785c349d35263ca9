"""Measure env steps per second of one env: LIBERO's own loop against `LiberoEnv.step_chunk`, in one run.

The reference is what the published evaluations do: OffScreenRenderEnv with two 256x256 cameras, one action at a time,
both cameras rendered at every step. Both envs run in this process and execute the same random actions. They take turns
chunk by chunk, so that a busy machine slows both equally. Printed are medians over the chunks.

    python -m benchmarks.env_step --task-suite libero_spatial --task-id 0 --chunks 20
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import numpy as np
import tyro

from envs.assets import find_pack
from envs.env import EnvSpec
from envs.libero import SETTLING_ACTION, SETTLING_STEPS, LiberoEnv, task_files
from envs.rendering import prepare
from envs.tasks import load_init_states

CHUNK_LENGTH = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Args:
    task_suite: str = "libero_spatial"
    task_id: int = 0
    chunks: int = 20
    """Chunks of actions that are timed."""
    num_images: int = 2
    """Cameras that step_chunk renders; the reference always renders two."""
    assets: str = "lowpoly"


@dataclass
class Timing:
    """What one of the two loops takes, in seconds."""

    make_s: float
    reset_s: float
    chunks_s: list[float] = field(default_factory=list)

    def row(self, name: str) -> str:
        chunk_s = median(self.chunks_s)
        return f"{name:34}{CHUNK_LENGTH / chunk_s:12.1f}{1000 * chunk_s:12.1f}{self.make_s:9.2f}{self.reset_s:9.2f}"


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Time a call; returns its seconds and its result."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def make_reference(spec: EnvSpec, task_id: int):
    """Build the env of the published evaluations."""
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


def main(args: Args) -> None:
    spec = EnvSpec(args.task_suite, (args.task_id,), args.num_images, args.assets)
    init_state = load_init_states(task_files(spec, args.task_id).init_states)[0]
    prepare()

    env = LiberoEnv(spec, args.task_id)
    # The first reset imports the simulator and builds it. Ours is made first, so that both can use its imports.
    env_make_s, _ = timed(lambda: env.reset(0))
    reference_make_s, reference = timed(lambda: make_reference(spec, args.task_id))
    reference_reset_s, _ = timed(lambda: reset_reference(reference, init_state))
    env_reset_s, _ = timed(lambda: env.reset(0))
    env_timing = Timing(env_make_s, env_reset_s)
    reference_timing = Timing(reference_make_s, reference_reset_s)

    renders_s = []
    generator = np.random.default_rng(0)
    for _ in range(args.chunks):
        actions = generator.uniform(-1, 1, (CHUNK_LENGTH, 7))
        started = time.perf_counter()
        step_reference(reference, actions)
        between = time.perf_counter()
        result = env.step_chunk(actions)
        env_timing.chunks_s.append(time.perf_counter() - between)
        reference_timing.chunks_s.append(between - started)
        renders_s.append(result.render_s)
        if result.done:
            env.reset(0)
            reset_reference(reference, init_state)
    reference.close()
    env.close()
    print_table(args, reference_timing, env_timing, median(renders_s))


def print_table(args: Args, reference: Timing, env: Timing, render_s: float) -> None:
    print(f"{args.task_suite} task {args.task_id}, {find_pack(args.assets)}, {args.chunks} chunks")
    print(f"{'':34}{'env steps/s':>12}{'ms a chunk':>12}{'make s':>9}{'reset s':>9}")
    print(reference.row("LIBERO's loop, 2 cameras each step"))
    print(env.row(f"step_chunk, {args.num_images} camera(s) each chunk"))
    chunk_s = median(env.chunks_s)
    ratio = median(reference.chunks_s) / chunk_s
    render_share = render_s / chunk_s
    print(
        f"ratio {ratio:.2f}; of step_chunk {render_share:.0%} is rendering, {1 - render_share:.0%} simulation"
    )
    print("(make of step_chunk includes the imports, the first reset and just-in-time compilation)")


if __name__ == "__main__":
    main(tyro.cli(Args))
