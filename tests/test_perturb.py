"""Perturbations: what each kind changes and leaves alone, on LIBERO's own simulator where it takes one."""

import itertools

import numpy as np
import pytest

from configs.config import TrainConfig, changed
from configs.sections import SimulatorConfig
from contracts import BadInput
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from envs.perturb import (
    APART_M,
    KINDS,
    MAX_ATTEMPTS,
    NONE,
    Perturbation,
    add_noise,
    displaced,
    label_of,
    paraphrase,
    scattered,
)
from envs.tasks import task_names
from rl.curriculum import TrainingEpisodes, perturbation_probabilities


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(EnvSpec("libero_spatial", (5,), num_images=1), 5)
    yield env
    env.close()


@pytest.fixture(scope="module")
def plain(env):
    return env.reset(Start(3)).observation


def differing(a, b) -> set[str]:
    """What a policy or critic can tell two observations by."""
    fields = ("images", "proprio", "state", "instruction")
    return {name for name in fields if not np.array_equal(getattr(a, name), getattr(b, name))}


def distance(a, b, field) -> float:
    return np.abs(getattr(a, field).astype(float) - getattr(b, field)).sum()


CHANGED = {
    "camera": {"images"},
    "light": {"images"},
    "noise": {"images"},
    "language": {"instruction"},
    "robot": {"images", "proprio", "state"},
    "position": {"images", "state"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_changes_what_it_says_by_its_magnitude_and_nothing_of_the_next_episode(env, plain, kind):
    strong = env.reset(Start(3, perturbation=Perturbation(kind, 5, 7))).observation
    assert differing(strong, plain) == CHANGED[kind]
    assert differing(env.reset(Start(3, perturbation=Perturbation(kind, 0, 7))).observation, plain) == set()
    if kind != "language":
        weak = env.reset(Start(3, perturbation=Perturbation(kind, 1, 7))).observation
        field = "state" if "state" in CHANGED[kind] else "images"
        assert 0 < distance(weak, plain, field) < distance(strong, plain, field)
    assert differing(env.reset(Start(3, perturbation=Perturbation(kind, 5, 7))).observation, strong) == set()
    assert not env.domain._check_success()


def test_the_camera_moves_sideways_and_up_or_down(env, plain):
    model = env.domain.sim.model
    camera = model.camera_name2id("agentview")
    env.reset(Start(3), observe=False)
    position = model.cam_pos[camera].copy()
    env.reset(Start(3, perturbation=Perturbation("camera", 5, 7)), observe=False)
    move = model.cam_pos[camera] - position
    assert np.linalg.norm(move[:2]) > 0.1  # m
    assert abs(move[2]) > 0.1


def test_each_attempt_moves_objects_less_far_and_the_last_one_not_at_all(env, plain):
    state = env.domain.sim.get_state().flatten()
    change = Perturbation("position", 5, 7)
    places = [displaced(state, env.domain, change, attempt) for attempt in (0, 1, MAX_ATTEMPTS)]
    first, second, last = (np.linalg.norm(place - state) for place in places)
    assert first > second > last == 0


def test_no_object_falls_where_places_change_and_a_bowl_stays_on_its_ramekin(env):
    for seed in range(2):
        env.reset(Start(seed, perturbation=Perturbation("position", 5, seed)))
        poses = {name: position for name, (position, _) in env._simulator.object_poses().items()}
        bowl, ramekin = poses["akita_black_bowl_1"], poses["glazed_rim_porcelain_ramekin_1"]
        assert np.linalg.norm((bowl - ramekin)[:2]) < 0.05
        assert bowl[2] > ramekin[2]
        assert min(position[2] for position in poses.values()) > 0.85  # the table


def test_an_object_between_others_moves_in_every_direction_and_all_keep_their_distance():
    # As in libero_spatial task 0: a bowl between a plate and a ramekin, another bowl, and a box.
    places = np.array([[-0.06, 0.20], [-0.19, 0.32], [0.06, 0.03], [-0.20, 0.19], [0.05, 0.20]])
    not_itself = ~np.eye(len(places), dtype=bool)
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    least_distance = np.minimum(distances, APART_M)[not_itself]
    steps = []
    for seed in range(200):
        moved = scattered(places, 0.06, np.random.default_rng(seed))
        np.testing.assert_allclose(np.linalg.norm(moved - places, axis=-1), 0.06)
        assert (np.linalg.norm(moved[:, None] - moved, axis=-1)[not_itself] >= least_distance).all()
        steps.append(moved[0] - places[0])
    quarters = np.histogram(np.arctan2(*np.transpose(steps)), bins=4, range=(-np.pi, np.pi))[0]
    assert quarters.min() > 30


def test_objects_without_room_stay_where_they_are():
    crowd = np.stack(np.meshgrid(np.arange(7), np.arange(7)), axis=-1).reshape(-1, 2) * APART_M
    np.testing.assert_array_equal(scattered(crowd, 0.06, np.random.default_rng(0)), crowd)


def test_a_paraphrase_is_of_the_instruction_and_says_nothing_of_files_or_variants():
    for name in (*task_names("libero_goal"), *task_names("libero_object")):
        instruction = name.replace("_", " ")
        sentences = [paraphrase(instruction, magnitude) for magnitude in range(6)]
        assert sentences[0] == instruction
        assert len(set(sentences)) == 6
        nouns = set(instruction.split()) - set(
            ["the", "a", "pick", "up", "place", "put", "open", "turn", "on", "push"]
        )
        for sentence in sentences:
            assert nouns <= set(sentence.replace(",", "").split())
            for word in ("_", "language", "tmp", "view", "level"):
                assert word not in sentence


def test_noise_is_another_at_every_step_and_the_same_for_the_same_step():
    image = np.full((1, 32, 32, 3), 128, np.uint8)
    change = Perturbation("noise", 1, 5)
    first = add_noise(image, change, 0)
    np.testing.assert_array_equal(add_noise(image, change, 0), first)
    assert (add_noise(image, change, 8) != first).mean() > 0.9
    assert (first - 128.0).std() == pytest.approx(0.08 * 255, rel=0.05)


def test_flags_name_kinds_and_magnitudes():
    assert SimulatorConfig(perturb=("none",)).perturbations == SimulatorConfig().perturbations == ()
    assert SimulatorConfig(perturb=("noise", "noise"), magnitudes=(2,)).perturbations == ("noise-2",)
    assert len(SimulatorConfig(perturb=("all",)).perturbations) == 3 * len(KINDS)
    with pytest.raises(BadInput, match="--magnitudes must be at least 1 and at most 5, got 6"):
        changed(TrainConfig(), perturb=("noise",), magnitudes=(6,))


def episodes(config, success, count=400, update=0):
    perturbed = perturbation_probabilities(config, success)
    return list(
        itertools.islice(TrainingEpisodes(changed(config, group_size=2), update, {}, None, perturbed), count)
    )


def test_a_group_trains_on_one_perturbation_drawn_by_seed_update_and_group():
    config = changed(TrainConfig(), perturb=("camera", "light"), magnitudes=(1, 5))
    drawn = episodes(config, {})
    assert drawn == episodes(config, {})
    assert drawn != episodes(config, {}, update=1)
    assert all(a.perturbation == b.perturbation for a, b in zip(drawn[::2], drawn[1::2], strict=True))
    labels = [label_of(e.perturbation) for e in drawn]
    shares = {label: labels.count(label) / len(labels) for label in labels}
    assert shares[NONE] == pytest.approx(1 / 3, abs=0.1)
    assert shares["light-5"] == pytest.approx(1 / 6, abs=0.1)
    assert len({e.perturbation.seed for e in drawn if e.perturbation}) > 50


def test_the_curriculum_prefers_magnitudes_that_succeed_half_of_the_time():
    config = changed(TrainConfig(), perturb=("camera",), magnitudes=(1, 3, 5), curriculum=True)
    shares = perturbation_probabilities(
        config, {NONE: 1.0, "camera-1": 0.9, "camera-3": 0.5, "camera-5": 0.0}
    )
    assert max(shares, key=shares.get) == "camera-3"
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0.05
