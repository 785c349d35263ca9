"""Questions to the machine's simulator, each asked in a process of its own.

A driver that hangs, crashes or leaves half-made contexts behind does not take the program along, and versions of MuJoCo
with which no env would be built can still be looked at.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from child_process import end_child, start_child
from errors import BadInput

T = TypeVar("T")
ANSWER_S = 120.0  # for an answer; the slowest one builds a LIBERO task, and compiles robosuite's functions before it
STALLED_S = 30.0
_SCENE = """
<mujoco><worldbody>
  <light pos="0 0 3"/><geom type="sphere" size="1"/><camera name="c" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/>
</worldbody></mujoco>
"""


class NoAnswer(Exception):
    """A question was not answered; the message says how the process ended, or what it raised."""


@dataclass(frozen=True)
class Renderer:
    """What draws the frames, as the driver calls itself."""

    backend: str  # "egl" or "osmesa"
    device: int | None  # EGL's number of it
    vendor: str
    name: str

    @property
    def in_software(self) -> bool:
        return any(word in self.name.lower() for word in ("llvmpipe", "softpipe", "swrast", "software"))


def ask(question: Callable[..., T], *arguments: object, answer_s: float = ANSWER_S) -> T:
    """`question(*arguments)`, computed by a fresh process. Raises BadInput that it raises, else NoAnswer."""
    process, connection = start_child("envs.simulator_probes", STALLED_S)
    with connection:
        try:
            connection.send((question, arguments))
            if not connection.poll(answer_s):
                end_child(process, show_stack=True)
                raise NoAnswer(f"no answer within {answer_s:.0f} s")
            answer = connection.recv()
        except (EOFError, OSError):
            raise NoAnswer(f"the process ended with {end_child(process)}") from None
    end_child(process)
    if isinstance(answer, (BadInput, NoAnswer)):
        raise answer
    return answer


def main(socket_fd: int) -> None:
    """The process: one question, one answer."""
    connection = Connection(socket_fd)
    with suppress(EOFError, ConnectionError):  # whoever asked was interrupted
        question, arguments = connection.recv()
        connection.send(_answer(question, arguments))
    sys.stderr.flush()
    os._exit(0)  # the interpreter's end would free GL contexts after their display, with a traceback for each


def _answer(question: Callable[..., T], arguments: Sequence[object]) -> T | BadInput | NoAnswer:
    try:
        return question(*arguments)
    except BadInput as problem:
        return problem
    except Exception as fault:  # whatever a broken driver or library raises is the answer
        traceback.print_exc()
        return NoAnswer(f"{type(fault).__name__}: {fault}")


def find_renderer() -> Renderer:
    """Draw one frame with MuJoCo alone and name the driver that drew it. Raises BadInput."""
    from envs.egl import choose_egl_device
    from envs.setup import egl_device, prepare_rendering

    backend = prepare_rendering()
    device = choose_egl_device(None) if backend == "egl" else None
    with egl_device(device or 0):
        import mujoco
        from OpenGL import GL

        model = mujoco.MjModel.from_xml_string(_SCENE)
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        renderer = mujoco.Renderer(model, 64, 64)
        renderer.update_scene(data, camera="c")
        if renderer.render().std() == 0:
            raise NoAnswer("a white sphere before a black background was drawn in one colour")
        vendor, name = (GL.glGetString(what).decode() for what in (GL.GL_VENDOR, GL.GL_RENDERER))
    return Renderer(backend, device, vendor, name)


def bowl_beside_ramekin_m() -> float:
    """Metres between the centres of bowl and ramekin, seen from above, after a reset of libero_spatial task 5.

    The bowl belongs into the ramekin. With the contacts of other versions of MuJoCo it slides off while it settles.
    """
    from envs.libero import EnvSpec, LiberoEnv

    env = LiberoEnv(EnvSpec("libero_spatial", (5,), num_images=1), 5)
    result = env.reset(0, observe=False)
    if result.error is not None:
        raise NoAnswer(result.error)
    positions = env.domain.sim.data._data
    bowl, ramekin = (
        positions.body(f"{name}_main").xpos for name in ("akita_black_bowl_1", "glazed_rim_porcelain_ramekin_1")
    )
    return float(np.linalg.norm((bowl - ramekin)[:2]))
