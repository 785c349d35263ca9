"""MetaWorldEnv against Meta-World's own env, stepped one action at a time and drawn by gymnasium."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from contracts import BadInput
from envs.env import IMAGE_SIZE, EnvSpec, Start
from envs.metaworld import CAMERA, CAMERA_POSITION, NUM_INIT_STATES, STORED, MetaWorldEnv
from envs.pool import make_env, task_info
from envs.rendering import prepare_imports, render_device
from envs.tasks import METAWORLD, METAWORLD_TASKS
from workshop.metaworld_expert import MetaWorldExpert

pytest.importorskip("metaworld")
NAMES = list(METAWORLD_TASKS)
REACH, DRAWER, DOOR = (NAMES.index(name) for name in ("reach-v3", "drawer-close-v3", "door-open-v3"))


def new_env(task_id: int, **options) -> MetaWorldEnv:
    env = make_env(EnvSpec(METAWORLD, (task_id,), num_images=1, **options), task_id)
    assert isinstance(env, MetaWorldEnv)
    return env


@pytest.fixture
def drawer():
    env = new_env(DRAWER)
    yield env
    env.close()


def pushes(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (count, 4))


def physics_of(env) -> np.ndarray:
    data = env._env.data
    return np.concatenate([data.qpos, data.qvel, data.mocap_pos.ravel(), env.raw])


@pytest.fixture
def reference():
    """Meta-World's env of the door task as its multi-task benchmark has it, drawn from the place where ours looks."""
    prepare_imports()
    with render_device():
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        view = {"render_mode": "rgb_array", "camera_name": CAMERA, "width": IMAGE_SIZE, "height": IMAGE_SIZE}
        env = ALL_V3_ENVIRONMENTS["door-open-v3"](**view)
        env.model.vis.quality.offsamples = 0
        env.model.camera(CAMERA).pos = CAMERA_POSITION
        env._partially_observable = False
        env._freeze_rand_vec = False
        env.seeded_rand_vec = True
        env._set_task_called = True
        del env.sawyer_observation_space
        env.mujoco_renderer._get_viewer("rgb_array").scn.flags[0] = 0  # mjRND_SHADOW
    yield env
    env.close()


OPEN_AT_THE_END = """
from envs.env import EnvSpec, Start
from envs.pool import make_env

for suite in ("libero_spatial", "metaworld_mt50"):
    env = make_env(EnvSpec(suite, (0,), num_images=1), 0)
    assert env.reset(Start(0)).error is None
"""


def test_simulators_that_are_open_at_the_end_of_a_program_close_before_gl_does():
    """Each of the two libraries ends the display that both draw on."""
    project = Path(__file__).resolve().parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", OPEN_AT_THE_END], cwd=project, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_tasks_are_those_of_meta_worlds_benchmark_in_its_order():
    prepare_imports()
    from metaworld.env_dict import MT50_V3

    assert list(MT50_V3) == NAMES
    infos = task_info(EnvSpec(METAWORLD, tuple(range(50)), num_images=1))
    assert [info.name for info in infos] == NAMES
    assert len({info.instruction for info in infos}) == 50
    with pytest.raises(BadInput, match=r"found 50; there are: 0 assembly-v3"):
        EnvSpec(METAWORLD, (50,))


def test_chunks_have_the_physics_and_the_picture_of_meta_worlds_own_env(reference):
    ours = new_env(DOOR)
    reference.np_random = np.random.default_rng([STORED, 7])
    raw, _ = reference.reset()
    result = ours.reset(Start(7))
    for seed in range(5):
        np.testing.assert_array_equal(ours.raw, raw)
        for name in ("qpos", "qvel", "mocap_pos"):
            np.testing.assert_array_equal(getattr(ours._env.data, name), getattr(reference.data, name))
        np.testing.assert_array_equal(result.observation.images[0], reference.render()[::-1, ::-1])
        np.testing.assert_array_equal(result.observation.proprio, raw[:4])
        for action in pushes(8, seed):
            raw, *_ = reference.step(action)
        result = ours.step_chunk(pushes(8, seed))
        assert (result.executed, result.env_steps) == (8, 8 * (seed + 1))
    ours.close()


@pytest.mark.parametrize("task_id", [REACH, DRAWER, DOOR])
def test_meta_worlds_experts_succeed(task_id):
    env = new_env(task_id)
    for init_state_id in range(2):
        result = env.reset(Start(init_state_id), observe=False)
        expert = MetaWorldExpert(env)
        while not result.done:
            result = env.step_chunk(expert.decide()[None], observe=False)
        assert result.success, f"{env.name}, initial state {init_state_id}"
        assert result.observation is None
    env.close()


@pytest.mark.parametrize("task_id", range(0, 50, 14))
def test_an_episode_is_a_function_of_its_start_alone(task_id):
    fresh = new_env(task_id)
    used = new_env(task_id)
    used.reset(Start(3), observe=False)
    used.step_chunk(pushes(60), observe=False)
    for env in (fresh, used):
        env.reset(Start(5), observe=False)
    np.testing.assert_array_equal(physics_of(fresh), physics_of(used))
    for env in (fresh, used):
        env.step_chunk(pushes(40, 1), observe=False)
    np.testing.assert_array_equal(physics_of(fresh), physics_of(used))
    fresh.close()
    used.close()


def test_initial_states_differ_from_one_another_and_from_fresh_ones(drawer):
    starts = [(i, 0) for i in range(NUM_INIT_STATES)] + [(None, seed) for seed in range(10)]
    goals = []
    for init_state_id, seed in starts:
        drawer.reset(Start(init_state_id, seed), observe=False)
        goals.append(drawer._env._target_pos.tobytes())
    assert len(set(goals)) == len(starts)
    drawer.reset(Start(0, seed=9), observe=False)  # the seed matters for fresh states only
    assert drawer._env._target_pos.tobytes() == goals[0]


def test_only_what_is_read_is_drawn(drawer, monkeypatch):
    result = drawer.reset(Start(0))
    render = drawer._renderer.render
    drawn = []

    def recorded_render():
        drawn.append(drawer.env_steps)
        return render()

    monkeypatch.setattr(drawer._renderer, "render", recorded_render)
    drawer.reset(Start(0))
    assert result.observation.images.shape == (1, IMAGE_SIZE, IMAGE_SIZE, 3)
    assert result.observation.instruction == "close the drawer"
    assert result.observation.state.dtype == np.float32
    drawer.step_chunk(np.zeros((8, 4)))
    drawer.step_chunk(np.zeros((8, 4)), observe=False)
    assert drawn == [0, 8]
    drawer.reset(Start(0, record=True), observe=False)
    assert len(drawer.step_chunk(np.zeros((3, 4)), observe=False).frames) == 3


def test_a_fault_ends_the_episode_and_the_next_reset_builds_anew(drawer):
    expected = drawer.reset(Start(0)).observation
    drawer._env.data.qpos[0] = np.nan  # MuJoCo resets such a state and only warns
    result = drawer.step_chunk(np.zeros((8, 4)))
    assert result.done
    assert not result.success
    assert "unstable" in result.error
    np.testing.assert_array_equal(drawer.reset(Start(0)).observation.images, expected.images)
