"""Perturb an episode: change the world in one way, with magnitude 1 to 5, to test how robust a policy is.

A perturbation changes the instruction, the images, the model of the scene or its initial state. The functions below
define what each kind does and how far a step of magnitude goes. All random numbers are drawn from (seed, kind), so a
larger magnitude goes further in the same direction; magnitude 0 changes nothing. The kinds are those of LIBERO-Plus
(Fei et al. 2025: camera, robot, noise, light, language) and LIBERO-PRO (Zhou et al. 2025: position); no code or data is
theirs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import numpy as np

if TYPE_CHECKING:
    import mujoco
    from libero.libero.envs.bddl_base_domain import BDDLBaseDomain

Kind = Literal["camera", "robot", "noise", "light", "language", "position"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAGNITUDES = range(6)
NONE = "none"  # the label of an unperturbed episode

# "A step" below is what one unit of magnitude changes.
ORBIT_DEG = 5.0  # a step of the camera around the point that it looks at, and half as much up or down
JOINTS_RAD = 0.1  # a step of the arm's 7 initial joints: the norm of the change
# Standard deviation of the noise by magnitude, where white is 1; the values of ImageNet-C (Hendrycks 2019).
NOISE_STD = (0.0, 0.08, 0.12, 0.18, 0.26, 0.38)
LIGHT_STOPS = 0.35  # a step of the strongest channel; one stop is twice or half as bright
SHIFT_M = 0.02  # a step of every object that stands on the table
STACKED_M = 0.07  # objects nearer than this in x and y move together: a bowl on a ramekin
APART_M = 0.13  # other objects keep this distance, or the distance that they had if it was smaller
NEARER = 0.8  # if an object would fall, the next attempt moves objects by this factor of the last distance
# Directions tried for each stack, attempts to find room for all stacks, and to find an initial state in which no object
# falls.
MAX_ATTEMPTS = 20
# Fields of the model that `change_scene` or fast physics may change; so may the headlight.
MODEL_FIELDS = ("cam_pos", "cam_quat", "light_diffuse", "geom_solref")
UPWARDS = np.array([0.0, 0.0, 1.0])

VERBS = {
    "pick up": "grab",
    "pick": "grab",
    "place": "set",
    "put": "set",
    "push": "slide",
    "turn on": "switch on",
    "open": "pull open",
}


class Perturbation(NamedTuple):
    """One change of the world; its random numbers are drawn from (seed, kind)."""

    kind: Kind
    magnitude: int  # 0 to 5
    seed: int

    def rng(self, *more: int) -> np.random.Generator:
        """A random generator that depends on seed and kind; the numbers `more` choose another stream."""
        return np.random.default_rng([self.seed, zlib.crc32(self.kind.encode()), *more])


def label_of(perturbation: Perturbation | None) -> str:
    """The name of a perturbation in results and metrics: `camera-3`, or `none`."""
    return NONE if perturbation is None else f"{perturbation.kind}-{perturbation.magnitude}"


def from_label(label: str, seed: int) -> Perturbation | None:
    """The perturbation that `label_of` names so, with this seed; None for `none`."""
    if label == NONE:
        return None
    kind, _, magnitude = label.partition("-")
    return Perturbation(cast(Kind, kind), int(magnitude), seed)


# -------------------------------------------------------------------------------------- the sentence and the picture


def paraphrase(instruction: str, magnitude: int) -> str:
    """Say the same instruction in other words; the larger the magnitude, the further from the benchmark's words."""
    other_verbs = re.sub(rf"\b({'|'.join(VERBS)})\b", lambda match: VERBS[match[0]], instruction)
    without_articles = re.sub(r"\b(the|a|an) ", "", other_verbs)
    sentences = (
        instruction,
        f"please {instruction}",
        other_verbs,
        f"would you {other_verbs} for me",
        f"here is what has to be done now: {without_articles}",
        f"lunch is over and the kitchen must be tidy before the guests come, so {without_articles}, and nothing else",
    )
    return sentences[magnitude]


def add_noise(images: np.ndarray, perturbation: Perturbation, env_step: int) -> np.ndarray:
    """uint8 images of any shape with Gaussian noise, which is different at every `env_step`."""
    std = 255.0 * NOISE_STD[perturbation.magnitude]
    noise = perturbation.rng(env_step).normal(0.0, std, images.shape)
    return np.clip(np.rint(images + noise), 0, 255).astype(np.uint8)


# ------------------------------------------------------------------------------------------------- the initial state


def displaced(
    state: np.ndarray, domain: BDDLBaseDomain, perturbation: Perturbation, attempt: int
) -> np.ndarray:
    """The initial state (1 + nq + nv,) with other joints of the arm (kind "robot") or moved objects ("position").

    Each `attempt` draws other places, and moves objects less far than the one before. From attempt MAX_ATTEMPTS on no
    object is moved.
    """
    state = state.copy()
    rng = perturbation.rng(attempt)
    if perturbation.kind == "robot":
        direction = rng.normal(size=7)
        state[1:8] += perturbation.magnitude * JOINTS_RAD * direction / np.linalg.norm(direction)
    if perturbation.kind == "position" and attempt < MAX_ATTEMPTS:
        joints = [thing.joints[-1] for thing in domain.objects_dict.values()]
        starts = [1 + domain.sim.model.get_joint_qpos_addr(joint)[0] for joint in joints]
        columns = np.add.outer(starts, (0, 1))  # (objects, 2): x and y of each
        state[columns] = scattered(state[columns], perturbation.magnitude * SHIFT_M * NEARER**attempt, rng)
    return state


def scattered(places: np.ndarray, radius: float, rng: np.random.Generator) -> np.ndarray:
    """Move every stack of objects by `radius` metres in a random direction; returns the new places (n, 2) in metres.

    Objects nearer than STACKED_M are one stack. Stacks move one after the other. A stack keeps its distance from those
    that moved before it, and not from those that have yet to move: if it did, an object between two others could move
    in few directions only. If a stack has no room, all begin again. After MAX_ATTEMPTS attempts nothing moves.
    """
    for _ in range(MAX_ATTEMPTS):
        moved = _scatter_once(places, radius, rng)
        if moved is not None:
            return moved
    return places


def _scatter_once(places: np.ndarray, radius: float, rng: np.random.Generator) -> np.ndarray | None:
    """New places (n, 2) of all stacks, or None if one of them has no room in MAX_ATTEMPTS directions."""
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    moved = places.copy()
    placed: list[int] = []  # the objects that have their new places
    while len(placed) < len(places):
        first = min(set(range(len(places))) - set(placed))
        stack = [i for i in range(len(places)) if i not in placed and distances[i, first] < STACKED_M]
        least_distances = np.minimum(distances[np.ix_(stack, placed)], APART_M)
        angles = rng.uniform(0, 2 * np.pi, MAX_ATTEMPTS)
        steps = radius * np.stack([np.cos(angles), np.sin(angles)], axis=-1)
        candidates = places[stack] + steps[:, None]  # (MAX_ATTEMPTS, objects of the stack, 2)
        gaps = np.linalg.norm(candidates[:, :, None] - moved[placed], axis=-1)
        has_room = (gaps >= least_distances).all(axis=(1, 2))
        if not has_room.any():
            return None
        moved[stack] = candidates[has_room.argmax()]
        placed += stack
    return moved


# ---------------------------------------------------------------------------------------------------------- the model


def changeable_arrays(domain: BDDLBaseDomain) -> list[np.ndarray]:
    """The arrays of the model that `change_scene` and fast physics may change, as views."""
    model = domain.sim.model._model
    headlight = model.vis.headlight
    return [*(getattr(model, name) for name in MODEL_FIELDS), headlight.ambient, headlight.diffuse]


def restore(domain: BDDLBaseDomain, as_built: Sequence[np.ndarray]) -> None:
    """Undo all changes of the model since `as_built` was copied from `changeable_arrays`."""
    for array, before in zip(changeable_arrays(domain), as_built, strict=True):
        array[:] = before


def change_scene(domain: BDDLBaseDomain, perturbation: Perturbation, instruction: str) -> str:
    """Change the model of a domain that is in its initial state; returns the perturbed instruction."""
    if perturbation.magnitude == 0:
        return instruction
    if perturbation.kind == "language":
        return paraphrase(instruction, perturbation.magnitude)
    if perturbation.kind == "camera":
        _move_camera(domain, perturbation)
    if perturbation.kind == "light":
        _change_light(domain, perturbation)
    return instruction


def _move_camera(domain: BDDLBaseDomain, perturbation: Perturbation) -> None:
    """Move the agentview camera around the point of the table that it looks at."""
    import mujoco

    model = domain.sim.model._model
    camera = domain.sim.model.camera_name2id("agentview")
    step = np.deg2rad(ORBIT_DEG * perturbation.magnitude)
    sideways, upwards = step * perturbation.rng().choice([-1, 1], 2)
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, model.cam_quat[camera])
    right, _, backward = matrix.reshape(3, 3).T
    table_height = min(domain.sim.data.body_xpos[body][2] for body in domain.obj_body_id.values())
    position = model.cam_pos[camera]
    centre = position - backward * (position[2] - table_height) / backward[2]
    _orbit(model, camera, centre, UPWARDS, sideways)
    _orbit(model, camera, centre, right, upwards / 2)


def _orbit(model: mujoco.MjModel, camera: int, centre: np.ndarray, axis: np.ndarray, angle: float) -> None:
    """Move and turn a camera by `angle` (rad) around the axis (3,) through the point `centre` (3,)."""
    import mujoco

    turn = np.zeros(4)
    offset = np.zeros(3)
    orientation = np.zeros(4)
    mujoco.mju_axisAngle2Quat(turn, axis, angle)
    mujoco.mju_rotVecQuat(offset, model.cam_pos[camera] - centre, turn)
    mujoco.mju_mulQuat(orientation, turn, model.cam_quat[camera])
    model.cam_pos[camera] = centre + offset
    model.cam_quat[camera] = orientation


def _change_light(domain: BDDLBaseDomain, perturbation: Perturbation) -> None:
    """Make the light brighter or darker and change its tint: one factor for each of red, green and blue."""
    model = domain.sim.model._model
    stops = perturbation.rng().uniform(-1, 1, 3)
    factors = 2.0 ** (perturbation.magnitude * LIGHT_STOPS * stops / np.abs(stops).max())
    for lights in (model.light_diffuse, model.vis.headlight.ambient, model.vis.headlight.diffuse):
        lights[:] = lights * factors
