"""Env steps a second of one env: LIBERO's default loop against `LiberoEnv.step_chunk`, in one run.

The reference is what the published evaluations do: OffScreenRenderEnv with two 256x256 cameras, one action at a time,
both cameras rendered at every step. Both envs run in this process, take turns chunk by chunk and execute the same
random actions, so that a busy machine slows both; medians over the chunks are printed.

    python -m benchmarks.env_step --task-suite libero_spatial --task-id 0 --chunks 20
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tyro

from envs.assets import find_pack
from envs.env import EnvSpec
from envs.libero import SETTLING_ACTION, SETTLING_STEPS, LiberoEnv, task_files
from envs.rendering import prepare
from envs.tasks import load_init_states

CHUNK = 8


@dataclass(frozen=True)
class Arguments:
    task_suite: str = "libero_spatial"
    task_id: int = 0
    chunks: int = 20
    num_images: int = 2
    """Cameras that step_chunk renders; the reference always renders two."""
    assets: str = "lowpoly"


def timed(action: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    outcome = action()
    return time.perf_counter() - started, outcome


def make_reference(spec: EnvSpec, task_id: int):
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
    # robosuite makes a GL context current only when it is made; here two envs take turns.
    reference.sim._render_context_offscreen.gl_ctx.make_current()
    for action in actions:
        reference.step(action)


def main(arguments: Arguments) -> None:
    spec = EnvSpec(arguments.task_suite, (arguments.task_id,), arguments.num_images, arguments.assets)
    init_state = load_init_states(task_files(spec, arguments.task_id).init_states)[0]
    prepare()

    ours = LiberoEnv(spec, arguments.task_id)
    our_make_s, _ = timed(
        lambda: ours.reset(0)
    )  # with the import of the simulator, so it comes first for both to use
    reference_make_s, reference = timed(lambda: make_reference(spec, arguments.task_id))
    reference_reset_s, _ = timed(lambda: reset_reference(reference, init_state))
    our_reset_s, _ = timed(lambda: ours.reset(0))

    generator = np.random.default_rng(0)
    reference_s, our_s, render_s = [], [], []
    for _ in range(arguments.chunks):
        actions = generator.uniform(-1, 1, (CHUNK, 7))
        reference_s.append(timed(lambda: step_reference(reference, actions))[0])  # noqa: B023
        seconds, result = timed(lambda: ours.step_chunk(actions))  # noqa: B023
        our_s.append(seconds)
        render_s.append(result.render_s)
        if result.done:
            ours.reset(0)
            reset_reference(reference, init_state)

    theirs, mine, render = (statistics.median(values) for values in (reference_s, our_s, render_s))
    print(
        f"{arguments.task_suite} task {arguments.task_id}, {find_pack(spec.assets)}, {arguments.chunks} chunks"
    )
    print(f"{'':34}{'env steps/s':>12}{'ms a chunk':>12}{'make s':>9}{'reset s':>9}")
    for name, chunk_s, make_s, reset_s in (
        ("LIBERO's loop, 2 cameras each step", theirs, reference_make_s, reference_reset_s),
        (f"step_chunk, {arguments.num_images} camera(s) each chunk", mine, our_make_s, our_reset_s),
    ):
        print(f"{name:34}{CHUNK / chunk_s:12.1f}{1000 * chunk_s:12.1f}{make_s:9.2f}{reset_s:9.2f}")
    print(
        f"ratio {theirs / mine:.2f}; of step_chunk {render / mine:.0%} is rendering, {1 - render / mine:.0%} simulation"
    )
    print("(make of step_chunk includes the imports, the first reset and just-in-time compilation)")
    reference.close()
    ours.close()


if __name__ == "__main__":
    main(tyro.cli(Arguments))
