"""LiberoEnv against LIBERO's own OffScreenRenderEnv, stepped one action at a time in the same process."""

import shutil
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from contracts import BadInput
from envs.assets import find_pack
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv, task_files
from envs.libero_simulator import SETTLING_ACTION
from tests.liberos_loop import Snapshot, libero_rollout, needs_official, state_of, stored_state
from vla.images import decode_jpeg, encode_jpeg, lanczos_resize

SUITE, TASK = "libero_spatial", 4  # a drawer is open there: one more thing that a reset draws at random
INIT_STATE = 7
GOLDEN = Path(__file__).parent / "golden"


def random_actions(count, seed=0):
    """Hard pushes in all directions, the gripper opening and closing."""
    generator = np.random.default_rng(seed)
    actions = generator.uniform(-1, 1, (count, 7))
    actions[:, 6] = np.repeat(generator.choice([-1.0, 1.0], count // 4 + 1), 4)[:count]
    return actions


@pytest.fixture(scope="module")
def actions():
    return random_actions(16)


def reference_of(assets, actions, frames_every) -> list[Snapshot]:
    state = stored_state(SUITE, TASK, INIT_STATE)
    return libero_rollout(SUITE, TASK, state, actions, frames_every, assets)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """The low-poly pack with robosuite's own robot, which LIBERO's own env draws with any pack."""
    folder = tmp_path_factory.mktemp("pack") / "assets"
    without_robot = shutil.ignore_patterns("robosuite")
    return str(shutil.copytree(find_pack("lowpoly").folder, folder, ignore=without_robot))


@pytest.fixture(scope="module")
def reference(pack, actions):
    return reference_of(pack, actions, frames_every=1)


@pytest.fixture(scope="module")
def env(pack):
    """One built env for many tests: nothing that they do may change what the next reset gives."""
    env = LiberoEnv(EnvSpec(SUITE, (TASK,), assets=pack), TASK)
    env.reset(Start(0), observe=False)
    yield env
    env.close()


@pytest.fixture(scope="module")
def basket():
    """An env of another suite."""
    env = LiberoEnv(EnvSpec("libero_object", (0,), num_images=1), 0)
    env.reset(Start(0), observe=False)
    yield env
    env.close()


def assert_same_observation(observation, snapshot):
    np.testing.assert_array_equal(observation.images, snapshot.images)
    np.testing.assert_array_equal(observation.proprio, snapshot.proprio)


def assert_chunks_are_liberos(env, reference, actions):
    env.reset(Start(3, seed=11))  # a past of another placement, another state and a closed gripper
    env.step_chunk(np.ones((8, 7)))
    result = env.reset(Start(INIT_STATE))
    assert_same_observation(result.observation, reference[0])
    for start in range(0, len(actions), 8):
        result = env.step_chunk(actions[start : start + 8])
        expected = reference[start + 8]
        assert_same_observation(result.observation, expected)
        np.testing.assert_array_equal(state_of(env.domain), expected.state)
        assert result.success == expected.success
        assert (result.executed, result.env_steps, result.done, result.error) == (8, start + 8, False, None)


def test_chunks_give_the_frames_and_states_of_liberos_own_loop(env, reference, actions):
    assert_chunks_are_liberos(env, reference, actions)


@needs_official
def test_a_chunk_does_so_in_official_looks_which_do_not_change_the_physics(reference, actions):
    official = reference_of("official", actions[:8], frames_every=8)
    env = LiberoEnv(EnvSpec(SUITE, (TASK,), assets="official"), TASK)
    assert_chunks_are_liberos(env, official, actions[:8])
    env.close()
    for lowpoly, snapshot in zip(reference, official, strict=False):
        np.testing.assert_array_equal(lowpoly.state, snapshot.state)
    assert (reference[0].images != official[0].images).any()


def test_the_low_poly_robot_is_robosuites_with_fewer_faces_and_the_same_physics(env, reference, actions):
    simple = LiberoEnv(EnvSpec(SUITE, (TASK,), assets="lowpoly"), TASK)
    images = simple.reset(Start(INIT_STATE)).observation.images
    simple.step_chunk(actions[:8])
    np.testing.assert_array_equal(state_of(simple.domain), reference[8].state)
    # In grey levels; a chunk of moves changes these two pictures by 4 and 42.
    assert 0 < np.abs(images - reference[0].images.astype(float)).mean() < 1.5
    assert simple.domain.sim.model._model.nmeshface < env.domain.sim.model._model.nmeshface / 3
    simple.close()


@needs_official
def test_official_pictures_are_those_that_the_public_checkpoints_know():
    """The sample observation that openvla-oft publishes, and our own picture of it in cells of 14 x 14 pixels."""
    sample = np.stack(
        np.split(imageio.imread(GOLDEN / "sample_observation.png"), 2, axis=1)
    )  # (2, 224, 224, 3)
    env = LiberoEnv(EnvSpec("libero_spatial", (0,), assets="official"), 0)
    frames = env.reset(Start(0)).observation.images
    env.close()
    planes = [np.ascontiguousarray(decode_jpeg(encode_jpeg(frame)).transpose(2, 0, 1)) for frame in frames]
    ours = np.stack([lanczos_resize(image, 224).transpose(1, 2, 0) for image in planes]).astype(float)
    # Mean difference of agentview and wrist in grey levels; that of low-poly pictures is 28.5 and 19.1.
    np.testing.assert_allclose(np.abs(ours - sample).mean(axis=(1, 2, 3)), [1.52, 1.36], atol=0.3)
    cells = ours.reshape(2, 16, 14, 16, 14, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(cells, np.load(GOLDEN / "pictures.npz")["official"], atol=3.0)


def test_frames_of_a_recording_are_liberos_at_every_step(env, reference, actions):
    frames = env.reset(Start(INIT_STATE, record=True)).frames
    for start in range(0, 16, 8):
        frames = frames + env.step_chunk(actions[start : start + 8]).frames
    np.testing.assert_array_equal(frames, [snapshot.images[0] for snapshot in reference[:17]])


def test_a_fresh_state_is_liberos_own_placement_and_a_bad_one_is_replaced_by_the_next(
    env, reference, actions, pack, monkeypatch
):
    problems = ["bowl falls"]
    monkeypatch.setattr(env._simulator, "find_problem", lambda _: problems.pop() if problems else None)
    expected = libero_rollout(SUITE, TASK, None, actions[:8], 8, pack, seed=(5, 1))
    result = env.reset(Start(None, seed=5, record=True))
    assert_same_observation(result.observation, expected[0])
    assert len(result.frames) == 1
    np.testing.assert_array_equal(state_of(env.domain), expected[0].state)
    assert_same_observation(env.step_chunk(actions[:8]).observation, expected[8])
    assert np.abs(expected[0].state - reference[0].state).max() > 0.01
    assert_same_observation(env.reset(Start(INIT_STATE)).observation, reference[0])  # no trace of it


@pytest.mark.parametrize(
    ("move", "velocity", "problem"),
    [
        (lambda pose: pose - np.array([0, 0, 0.3, 0, 0, 0, 0]), 0.0, "akita_black_bowl_1 falls"),
        (lambda pose: pose + np.array([0.1, 0, 0, 0, 0, 0, 0]), 0.0, "akita_black_bowl_1 is pushed away"),
        (lambda pose: np.array([*pose[:3], 0.5, 0.5, 0.5, 0.5]), 0.0, "akita_black_bowl_1 tips over"),
        (lambda pose: pose, 0.1, "akita_black_bowl_1 does not come to rest"),
        (None, 0.0, "already solved"),
    ],
)
def test_no_episode_starts_with_a_fall_a_tilt_motion_or_a_goal_that_holds(
    env, monkeypatch, move, velocity, problem
):
    env.reset(Start(None, seed=1))
    simulator = env._simulator
    domain = env.domain
    placed = simulator.object_poses()
    joint = domain.objects_dict["akita_black_bowl_1"].joints[-1]
    assert simulator.find_problem(placed) is None
    if move is None:
        monkeypatch.setattr(domain, "_check_success", lambda: True)
    else:
        domain.sim.data.set_joint_qpos(joint, move(domain.sim.data.get_joint_qpos(joint).copy()))
        domain.sim.data.set_joint_qvel(joint, np.array([velocity, 0, 0, 0, 0, 0]))
    domain.sim.forward()
    assert simulator.find_problem(placed) == problem


def make_unstable(domain):
    domain.sim.data.qvel[:] = 1e12


def make_it_raise(domain):
    domain._check_success = lambda: 1 // 0


@pytest.mark.parametrize(
    ("harm", "error"), [(make_unstable, "unstable"), (make_it_raise, "ZeroDivisionError")]
)
def test_a_fault_of_the_simulator_is_an_error_and_the_next_reset_recovers(env, reference, harm, error):
    env.reset(Start(2))
    harm(env.domain)
    result = env.step_chunk(random_actions(8))
    assert (result.done, result.success, result.observation) == (True, False, None)
    assert error in result.error
    with pytest.raises(AssertionError):
        env.step_chunk(random_actions(8))
    assert_same_observation(env.reset(Start(INIT_STATE)).observation, reference[0])


def test_two_envs_in_one_process_render_their_own_scenes(env, basket, reference, actions):
    env.reset(Start(INIT_STATE))
    first = basket.reset(Start(0)).observation
    assert_same_observation(env.step_chunk(actions[:8]).observation, reference[8])
    np.testing.assert_array_equal(basket.reset(Start(0)).observation.images, first.images)
    assert_same_observation(env.step_chunk(actions[8:16]).observation, reference[16])


def test_one_image_is_the_agentview_of_two_and_a_step_limit_cuts_a_chunk(reference, pack):
    env = LiberoEnv(EnvSpec(SUITE, (TASK,), num_images=1, assets=pack, max_env_steps=11), TASK)
    result = env.reset(Start(INIT_STATE))
    np.testing.assert_array_equal(result.observation.images, reference[0].images[:1])
    np.testing.assert_array_equal(result.observation.proprio, reference[0].proprio)
    # The second chunk ends after 3 of 8 actions, with nothing rendered.
    first = env.step_chunk(np.zeros((8, 7)))
    second = env.step_chunk(np.zeros((8, 7)))
    assert (first.done, first.executed) == (False, 8)
    assert (second.done, second.executed, second.env_steps) == (True, 3, 11)
    assert (second.success, second.observation, second.error, second.render_s) == (False, None, None, 0.0)
    env.close()


@pytest.mark.parametrize(("suite", "task_id"), [("libero_10", 8), ("libero_90", 0)])
def test_states_are_liberos_to_the_bit_in_long_episodes_and_other_rooms(suite, task_id):
    actions = random_actions(50, seed=task_id)
    expected = libero_rollout(suite, task_id, stored_state(suite, task_id, INIT_STATE), actions)
    env = LiberoEnv(EnvSpec(suite, (task_id,), num_images=1), task_id)
    env.reset(Start(0, seed=3))
    env.reset(Start(INIT_STATE))
    for start in range(0, 50, 10):
        env.step_chunk(actions[start : start + 10])
        np.testing.assert_array_equal(state_of(env.domain), expected[start + 10].state)
    moved = np.abs(expected[-1].state - expected[0].state)[:7].max()  # rad
    env.close()
    assert moved > 0.1  # the comparison was one of motion


def test_success_ends_the_chunk_at_the_step_where_libero_sees_it(basket, monkeypatch):
    """A can of soup falls into the basket while the robot stands still."""
    domain = basket.domain
    state = stored_state("libero_object", 0, 0).copy()

    def position_of(name):  # a view of the state
        joint = domain.objects_dict[name].joints[-1]
        start = 1 + domain.sim.model.get_joint_qpos_addr(joint)[0]
        return state[start : start + 3]

    position_of("alphabet_soup_1")[:] = position_of("basket_1")
    position_of("alphabet_soup_1")[2] += 2.2
    actions = np.tile(SETTLING_ACTION, (16, 1))

    expected = libero_rollout("libero_object", 0, state, actions)
    first_success = [snapshot.success for snapshot in expected].index(True)
    assert 1 < first_success < 16
    assert first_success % 8 != 0  # inside a chunk

    monkeypatch.setattr(basket, "_numbered_starts", [(state, None)])
    result = basket.reset(Start(0))
    while not result.done:
        result = basket.step_chunk(actions[:8])
    assert (result.success, result.observation, result.error) == (True, None, None)
    assert (result.env_steps, result.executed) == (first_success, first_success % 8)
    np.testing.assert_array_equal(state_of(domain), expected[first_success].state)


@pytest.fixture
def users_file(tmp_path):
    """A task of one's own: a BDDL file without stored states."""
    path = tmp_path / "own_task.bddl"
    path.write_text(task_files(EnvSpec("libero_goal", (7,)), 7).bddl.read_text())
    return path


def test_a_bddl_file_without_stored_states_has_reproducible_sampled_ones(users_file):
    env = LiberoEnv(EnvSpec("libero_goal", (0,), num_images=1, bddl_file=str(users_file)), 0)
    first = env.reset(Start(3)).observation
    other = env.reset(Start(4)).observation
    again = env.reset(Start(3)).observation
    fresh = env.reset(Start(None, seed=3)).observation  # training may draw it, so no evaluation may use it
    env.close()
    np.testing.assert_array_equal(first.images, again.images)
    assert (first.images != other.images).any()
    assert (first.images != fresh.images).any()
    assert first.instruction == "turn on the stove"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- wine_rack", "- wine_shelf"),
        ("(Turnon flat_stove_1)", "(Ignite flat_stove_1)"),
        ("(On plate_1 main_table_plate_region)", ""),
        ("(On flat_stove_1 main_table_stove_region)", "(On flat_stove_1 main_table_stove_regoin)"),
        ("(On plate_1 main_table_plate_region)", "(On plate_1 main_table_plate_region) (Open plate_9)"),
        ("(On plate_1 main_table_plate_region)", "(In plate_1 akita_black_bowl_1)"),
        # There is no room.
        ("(On plate_1 main_table_plate_region)", "(On plate_1 main_table_akita_black_bowl_region)"),
    ],
)
def test_a_file_of_ones_own_that_libero_cannot_build_is_bad_input(users_file, old, new):
    text = users_file.read_text()
    assert old in text
    users_file.write_text(text.replace(old, new))
    env = LiberoEnv(EnvSpec("libero_goal", (0,), bddl_file=str(users_file)), 0)
    with pytest.raises(BadInput, match=users_file.name):
        env.reset(Start(0))
