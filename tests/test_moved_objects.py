"""Objects are moved as far as asked, keep their distance, and stay where they are put."""

import numpy as np
import pytest

from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from workshop.moved_objects import APART_M, moved_state, reset_with_moved_objects, scattered


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(EnvSpec("libero_spatial", (5,), num_images=1), 5)
    yield env
    env.close()


@pytest.mark.parametrize("init_state_id", [3, None])
def test_a_bowl_stays_on_its_ramekin_and_the_next_episode_is_as_ever(env, init_state_id):
    start = Start(init_state_id, seed=1)
    plain = env.reset(start).observation
    moved = reset_with_moved_objects(env, start, 0.08, np.random.default_rng(0)).observation
    assert not np.array_equal(moved.images, plain.images)
    poses = {name: position for name, (position, _) in env._simulator.object_poses().items()}
    bowl, ramekin = poses["akita_black_bowl_1"], poses["glazed_rim_porcelain_ramekin_1"]
    assert np.linalg.norm((bowl - ramekin)[:2]) < 0.05
    assert bowl[2] > ramekin[2]
    assert min(position[2] for position in poses.values()) > 0.85  # the table
    assert not env.domain._check_success()
    np.testing.assert_array_equal(env.reset(start).observation.images, plain.images)


def test_all_is_moved_less_far_if_an_object_falls(env):
    env.reset(Start(0), observe=False)
    placed = env.placement.state
    beyond_the_table = moved_state(env, placed, 2.0, np.random.default_rng(0))
    fallen = env.reset(Start(0), placement=env.placement._replace(state=beyond_the_table))
    assert "falls" in fallen.error
    result = reset_with_moved_objects(env, Start(0), 2.0, np.random.default_rng(0))
    assert result.error is None
    assert 0 < np.abs(env.placement.state - placed).max() < 2.0


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
