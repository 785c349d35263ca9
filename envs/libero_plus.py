"""The variants of LIBERO-Plus (Fei et al. 2025) that need no files of its own: camera, robot, language and noise.

Every variant is a task of LIBERO with one change, and starts from the task's first initial state. Its name says what
the change is: TASK_view_H_V_S_R_E_initstate_N_noise_K. The formulas are those of its published code.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from envs import plus_noise
from envs.bddl import read_instruction
from envs.data_packages import LIBERO_PLUS, packaged_file
from envs.tasks import PLUS_CHANGES, instruction_in, split_suite, task_name

if TYPE_CHECKING:
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain
    from scipy.spatial.transform import Rotation

NAME = re.compile(
    r"(?P<task>.+?)(?:_language_(?P<sentence>\d+))?_view_(?P<view>\d+_\d+_\d+_\d+_\d+)"
    r"_initstate_(?P<arm>\d+)(?:_noise_(?P<noise>\d+))?"
)
PIVOT = np.array([0.0, 0.0, 0.8])  # metres; cameras orbit around this point, also where there is no table
NUM_ARM_POSES = 500
ARM_STEP_RAD = 0.1  # poses 1 to 100 differ from LIBERO's by this norm, 101 to 200 by twice as much, and so on


@dataclass(frozen=True)
class Variant:
    """What a variant changes in its task."""

    name: str
    suite: str  # LIBERO's suite of the task
    task: str
    # What the camera does: orbit sideways, orbit upwards (degrees), distance (percent), turn around the vertical, tilt.
    view: tuple[int, ...]
    arm: int  # number of the arm's initial pose, from 1; 0: LIBERO's
    noise: int  # number of the noise on agentview, from 1; 0: none
    sentence: int  # number of the paraphrase, from 1; 0: none

    @property
    def category(self) -> str:
        """camera, robot, language or noise."""
        if self.noise:
            return "noise"
        if self.sentence:
            return "language"
        return "robot" if self.arm else "camera"

    def instruction(self, leaks: bool = False) -> str:
        """What the policy is told: the paraphrase of a language variant, else LIBERO's instruction.

        With `leaks` it is what the published loop says: for all but language variants the whole name, with the numbers
        of the change at its end. The published figures were measured so.
        """
        if self.sentence:
            file = f"{self.suite}/{self.task}_language_{self.sentence}.bddl"
            return read_instruction(packaged_file(LIBERO_PLUS, f"liberoplus/liberoplus/bddl_files/{file}"))
        return instruction_in(self.name if leaks else self.task)

    def noisy(self, picture: np.ndarray, seed: int, env_step: int) -> np.ndarray:
        """A picture of agentview (256, 256, 3) with the noise of a noise variant."""
        rng = np.random.default_rng([seed, self.noise, env_step])
        return plus_noise.published_noise(picture, self.noise, rng)


def find_variants(task_suite: str, task_id: int) -> tuple[Variant, ...]:
    """The variants of a task in a suite of LIBERO-Plus, in its order; () for other suites.

    In a suite *_plus the four categories are mixed, so that a range of variants has about the same share of each.
    Raises BadInput if the package is not there.
    """
    base, change = split_suite(task_suite)
    if change not in PLUS_CHANGES:
        return ()
    task = task_name(base, task_id)
    categories = PLUS_CHANGES[:-1] if change == "plus" else (change,)
    positions: dict[Variant, float] = {}  # of each variant in its category, from 0 to 1
    for category in categories:
        members = [v for v in suite_variants(base) if v.task == task and v.category == category]
        positions |= {variant: (index + 0.5) / len(members) for index, variant in enumerate(members)}
    # Sort by position, so that every prefix has the same mix of categories.
    return tuple(sorted(positions, key=lambda variant: positions[variant]))


@cache
def suite_variants(suite: str) -> tuple[Variant, ...]:
    """All variants of the four categories of one of LIBERO's suites, in LIBERO-Plus's order."""
    path = packaged_file(LIBERO_PLUS, "liberoplus/liberoplus/benchmark/libero_suite_task_map.py")
    task_map = ast.literal_eval(path.read_text().partition("=")[2].strip())  # the file assigns one dict
    variants = []
    for match in filter(None, map(NAME.fullmatch, task_map[suite])):
        view = tuple(int(part) for part in match["view"].split("_"))
        arm, noise, sentence = (int(match[group] or 0) for group in ("arm", "noise", "sentence"))
        variants.append(Variant(match[0], suite, match["task"], view, arm, noise, sentence))
    return tuple(variants)


@cache
def arm_offset(arm: int) -> np.ndarray:
    """What pose `arm` adds to the initial joints of LIBERO's arm, (7,) in rad."""
    if arm == 0:
        return np.zeros(7)
    directions = np.random.RandomState(42).randn(NUM_ARM_POSES, 7)  # the published poses were drawn so
    direction = directions[arm - 1]
    return ARM_STEP_RAD * (1 + (arm - 1) // 100) * direction / np.linalg.norm(direction)


# ------------------------------------------------------------------------------------------------------- the camera


def move_camera(domain: BDDLBaseDomain, view: tuple[int, ...]) -> None:
    """Move the agentview camera of a domain in which it stands where LIBERO puts it."""
    model = domain.sim.model._model
    camera = domain.sim.model.camera_name2id("agentview")
    position, quaternion = camera_pose(view, model.cam_pos[camera], model.cam_quat[camera])
    model.cam_pos[camera] = position
    model.cam_quat[camera] = quaternion / np.linalg.norm(quaternion)


def camera_pose(
    view: tuple[int, ...], position: np.ndarray, quaternion: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The camera's position (3,) in metres and quaternion (4,; w, x, y, z) in a view, from those in LIBERO.

    The published code rounds to four decimals after every step, even where a view changes nothing.
    """
    from scipy.spatial.transform import Rotation  # takes 0.2 s, which only simulators need

    sideways, upwards, distance, turn, tilt = view
    if upwards:
        rotation = Rotation.from_rotvec([0.0, np.radians(-upwards), 0.0])
        position = _rounded(rotation.apply(position - PIVOT) + PIVOT)
        quaternion = _rotated(quaternion, rotation)
    rotation = Rotation.from_euler("z", sideways, degrees=True)
    position = _rounded(rotation.apply(position))
    quaternion = _rotated(quaternion, rotation)
    if distance != 100:
        position = _rounded(PIVOT + (position - PIVOT) * (distance / 100))
    if turn:
        quaternion = _rotated(quaternion, Rotation.from_euler("z", turn, degrees=True))
    if tilt:
        quaternion = _rotated(quaternion, Rotation.from_rotvec([0.0, np.radians(-tilt), 0.0]))
    return position, quaternion


def _rotated(quaternion: np.ndarray, rotation: Rotation) -> np.ndarray:
    """`rotation` after the rotation `quaternion` (w, x, y, z), rounded."""
    product = rotation * type(rotation).from_quat(np.roll(quaternion, -1))  # SciPy: x, y, z, w
    return _rounded(np.roll(product.as_quat(), 1))


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.array([round(value, 4) for value in values.tolist()])
