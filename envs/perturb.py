"""Ways in which the world may differ from the one that a policy was trained in, each in steps of 1 to 5.

A perturbation changes the sentence, the picture, the model of the scene, its initial state or its goal: what each kind
does, and how far a step goes, is in the functions below and nowhere else. All is drawn from (seed, kind), so a larger
magnitude goes further the same way, and magnitude 0 changes nothing. Compare LIBERO-Plus (Fei et al. 2025: camera,
robot, noise, light, language) and LIBERO-PRO (Zhou et al. 2025: position, task, object); no code or data is theirs.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np

from contracts import BadInput

Kind = Literal["camera", "robot", "noise", "light", "language", "position", "task", "object"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAGNITUDES = range(6)
NONE = "none"  # the label of an unperturbed episode

ORBIT_DEG = 5.0  # a step of the camera around what it looks at, and half as much up or down
JOINTS_RAD = 0.1  # a step of the arm's 7 initial joints, all together (their norm)
NOISE_STD = (0.0, 0.08, 0.12, 0.18, 0.26, 0.38)  # of white in pixels, as ImageNet-C has it (Hendrycks 2019)
LIGHT_STOPS = 0.35  # a step of the strongest channel: twice as bright or half as bright is 1
SHIFT_M = 0.02  # a step of every object that stands on the table
STACKED_M = 0.07  # objects nearer than this in x and y move together: a bowl on a ramekin
APART_M = 0.13  # others keep this distance, or what they had
NEARER = 0.8  # where something would fall, the next draw goes this much less far
MAX_DRAWS = 20
COLOURS = np.array(
    [[0.9, 0.1, 0.1], [0.1, 0.7, 0.1], [0.1, 0.2, 0.9], [0.9, 0.8, 0.1], [0.7, 0.1, 0.8], [1, 1, 1]]
)
UNSET_RGBA = np.array([0.5, 0.5, 0.5, 1.0])  # of a geom whose material or texture decides
MODEL_FIELDS = ("cam_pos", "cam_quat", "light_diffuse", "geom_rgba", "geom_matid", "geom_solref")

VERBS = {
    "pick up": "grab", "pick": "grab", "place": "set", "put": "set", "push": "slide", "turn on": "switch on",
    "open": "pull open",
}  # fmt: skip


class Perturbation(NamedTuple):
    kind: Kind
    magnitude: int  # 0 to 5
    seed: int = 0

    def rng(self, *more: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(self.kind.encode()), *more])


def label_of(perturbation: Perturbation | None) -> str:
    return NONE if perturbation is None else f"{perturbation.kind}-{perturbation.magnitude}"


def from_label(label: str, seed: int) -> Perturbation | None:
    kind, _, magnitude = label.partition("-")
    return None if label == NONE else Perturbation(cast(Kind, kind), int(magnitude), seed)


def paraphrase(instruction: str, magnitude: int) -> str:
    """The same demand in words further and further from those of the benchmark."""
    other_verbs = re.sub(rf"\b({'|'.join(VERBS)})\b", lambda found: VERBS[found[0]], instruction)
    without_articles = re.sub(r"\b(the|a|an) ", "", other_verbs)
    return (
        instruction,
        f"please {instruction}",
        other_verbs,
        f"would you {other_verbs} for me",
        f"here is what has to be done now: {without_articles}",
        f"lunch is over and the kitchen must be tidy before the guests come, so {without_articles}, and nothing else",
    )[magnitude]


def noisy(images: np.ndarray, perturbation: Perturbation, env_step: int) -> np.ndarray:
    """Gaussian noise on uint8 images, another one at every step."""
    noise = perturbation.rng(env_step).normal(0.0, 255.0 * NOISE_STD[perturbation.magnitude], images.shape)
    return np.clip(np.rint(images + noise), 0, 255).astype(np.uint8)


def displaced(state: np.ndarray, domain: Any, perturbation: Perturbation, draw: int) -> np.ndarray:
    """The initial state (1 + nq + nv,) with other joints of the arm, or other places of the objects."""
    state, rng = state.copy(), perturbation.rng(draw)
    if perturbation.kind == "robot":
        direction = rng.normal(size=7)
        state[1:8] += perturbation.magnitude * JOINTS_RAD * direction / np.linalg.norm(direction)
    if perturbation.kind == "position" and draw < MAX_DRAWS:
        joints = [thing.joints[-1] for thing in domain.objects_dict.values()]
        starts = [1 + domain.sim.model.get_joint_qpos_addr(joint)[0] for joint in joints]
        columns = np.add.outer(starts, (0, 1))  # (objects, 2): x and y of each
        state[columns] = scattered(state[columns], perturbation.magnitude * SHIFT_M * NEARER**draw, rng)
    return state


def scattered(places: np.ndarray, radius: float, rng: np.random.Generator) -> np.ndarray:
    """Every stack of the (n, 2) places moved by `radius` metres, each its own way, where the others leave room."""
    before = np.linalg.norm(places[:, None] - places, axis=-1)
    places, left = places.copy(), set(range(len(places)))
    while left:
        stack = [i for i in left if before[i, min(left)] < STACKED_M]
        left -= set(stack)
        others = [i for i in range(len(places)) if i not in stack]
        needed = np.minimum(before[np.ix_(stack, others)], APART_M)
        for angle in rng.uniform(0, 2 * np.pi, MAX_DRAWS):
            moved = places[stack] + radius * np.array([np.cos(angle), np.sin(angle)])
            if (np.linalg.norm(moved[:, None] - places[others], axis=-1) >= needed).all():
                places[stack] = moved
                break
    return places


def snapshot(domain: Any) -> dict[str, np.ndarray]:
    """What `change_scene` and fast physics may change of the model, as it is: for `restore`."""
    model = domain.sim.model._model
    headlight = model.vis.headlight
    fields = {name: getattr(model, name).copy() for name in MODEL_FIELDS}
    return fields | {"ambient": headlight.ambient.copy(), "diffuse": headlight.diffuse.copy()}


def restore(domain: Any, as_built: dict[str, np.ndarray], goal: list) -> None:
    model = domain.sim.model._model
    for name in MODEL_FIELDS:
        getattr(model, name)[:] = as_built[name]
    model.vis.headlight.ambient[:], model.vis.headlight.diffuse[:] = as_built["ambient"], as_built["diffuse"]
    domain.parsed_problem["goal_state"] = goal


def change_scene(domain: Any, perturbation: Perturbation, instruction: str) -> str:
    """Change the model, or the goal, of a domain that stands in its initial state; returns the instruction."""
    kind, magnitude, _ = perturbation
    if magnitude == 0:
        return instruction
    if kind == "language":
        return paraphrase(instruction, magnitude)
    if kind == "task":
        return _other_goal(domain, magnitude)
    if kind == "camera":
        _move_camera(domain, perturbation)
    if kind == "light":
        _change_light(domain, perturbation)
    if kind == "object":
        _recolour(domain, perturbation)
    return instruction


def _move_camera(domain: Any, perturbation: Perturbation) -> None:
    """Around the point of the table that the agentview camera looks at."""
    import mujoco

    model, camera = domain.sim.model._model, domain.sim.model.camera_name2id("agentview")
    sideways, upwards = np.deg2rad(ORBIT_DEG * perturbation.magnitude) * perturbation.rng().choice([-1, 1], 2)
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, model.cam_quat[camera])
    right, _, backward = matrix.reshape(3, 3).T
    height = min(
        position[2] for position in (domain.sim.data.body_xpos[body] for body in domain.obj_body_id.values())
    )
    centre = model.cam_pos[camera] - backward * (model.cam_pos[camera][2] - height) / backward[2]
    for axis, angle in ((np.array([0.0, 0.0, 1.0]), sideways), (right, upwards / 2)):
        turn, offset, turned = np.zeros(4), np.zeros(3), np.zeros(4)
        mujoco.mju_axisAngle2Quat(turn, axis, angle)
        mujoco.mju_rotVecQuat(offset, model.cam_pos[camera] - centre, turn)
        mujoco.mju_mulQuat(turned, turn, model.cam_quat[camera])
        model.cam_pos[camera], model.cam_quat[camera] = centre + offset, turned


def _change_light(domain: Any, perturbation: Perturbation) -> None:
    """Brighter or darker, and of another tint: one factor for each of red, green and blue."""
    model, stops = domain.sim.model._model, perturbation.rng().uniform(-1, 1, 3)
    factors = 2.0 ** (perturbation.magnitude * LIGHT_STOPS * stops / np.abs(stops).max())
    for lights in (model.light_diffuse, model.vis.headlight.ambient, model.vis.headlight.diffuse):
        lights[:] = lights * factors


def _recolour(domain: Any, perturbation: Perturbation) -> None:
    """What the goal names first turns from its mean colour into another, and loses its texture."""
    model, sim = domain.sim.model._model, domain.sim
    colour = perturbation.rng().choice(COLOURS)
    named = {_owner(fact[1], domain) for fact in domain.parsed_problem["goal_state"]}
    bodies = [domain.obj_body_id[name] for name in named]
    for geom in np.flatnonzero(np.isin(model.body_rootid[model.geom_bodyid], bodies)):
        own, material = model.geom_rgba[geom], model.geom_matid[geom]
        if material >= 0 and np.allclose(own, UNSET_RGBA):
            texture = model.mat_texid[material].max()
            mean = sim.texture_colours[texture] if texture >= 0 else np.ones(3)
            own = np.append(mean * model.mat_rgba[material][:3], 1.0)
            model.geom_matid[geom] = -1
        share = perturbation.magnitude / 5
        model.geom_rgba[geom, :3] = (1 - share) * own[:3] + share * colour


def _other_goal(domain: Any, magnitude: int) -> str:
    """Another object of the scene is to go where the task's own should (onto the last one if that is to go nowhere)."""
    categories = {name: thing.category_name for name, thing in domain.objects_dict.items()}
    goals = [fact for fact in domain.parsed_problem["goal_state"] if len(fact) == 3] or [
        ["on", "", [*categories][-1]]
    ]
    taken = {categories.get(_owner(word, domain)) for fact in goals for word in fact[1:]}
    others = sorted(
        {category: name for name, category in categories.items() if category not in taken}.items()
    )
    if not others:
        told = " ".join(domain.parsed_problem["language_instruction"])
        raise BadInput(f"--perturb task: there is no other object in the scene of {told!r}: leave task out")
    category, name = others[(magnitude - 1) % len(others)]
    relation, _, target = goals[0]
    place = (
        _owner(target, domain) if _owner(target, domain) in domain.obj_body_id else "table"
    )  # a region of it
    domain.parsed_problem["goal_state"] = [[relation, name, target]]
    where = "in" if relation.lower() == "in" else "on"
    named = re.sub(r"_\d+$", "", place)
    return f"pick up the {category} and place it {where} the {named}".replace("_", " ")


def _owner(name: str, domain: Any) -> str:
    """The object or fixture that a name in a goal belongs to: `basket_1` of `basket_1_contain_region`."""
    return next(thing for thing in (*domain.obj_body_id, name) if f"{name}_".startswith(f"{thing}_"))
