"""Fast physics: LIBERO's motor commands, motion and observations as long as nothing new is touched; no trace of it."""

import numpy as np
import pytest

from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv

ACTIONS = np.random.default_rng(0).uniform(-1.0, 1.0, (8, 7))  # far above the table


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv(EnvSpec("libero_spatial", (4,)), 4)  # a bowl in a drawer, one on the cabinet
    yield env
    env.close()


def played(env, physics):
    """The motor commands (8 * substeps, 9) of all physics steps of a chunk, and its result."""
    import mujoco  # which an env has to precede

    env.reset(Start(0, physics=physics))
    commands = []
    physics_step = mujoco.mj_step2

    def recorded_step(model, data):
        commands.append(data.ctrl.copy())
        physics_step(model, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mujoco, "mj_step2", recorded_step)
        result = env.step_chunk(ACTIONS)
    return np.array(commands), result


def test_with_as_many_physics_steps_a_chunk_in_the_air_is_libero_s(env, monkeypatch):
    monkeypatch.setattr("envs.libero.FAST_SUBSTEPS", 25)
    exact_commands, exact = played(env, "exact")
    fast_commands, fast = played(env, "fast")
    assert exact_commands.shape == (8 * 25, 9)
    assert np.ptp(exact_commands, axis=0).min() > 0.0  # every motor was moved
    np.testing.assert_allclose(fast_commands, exact_commands, rtol=1e-6, atol=1e-9)
    # In metres and radians, of the same moment.
    np.testing.assert_allclose(fast.observation.proprio, exact.observation.proprio, atol=1e-6)
    assert (fast.observation.images != exact.observation.images).mean() < 1e-3
    assert not np.array_equal(fast_commands, exact_commands)  # else fast physics was not in use


def test_with_half_as_many_the_hand_stays_within_two_millimetres(env):
    exact_commands, exact = played(env, "exact")
    fast_commands, fast = played(env, "fast")
    assert (len(exact_commands), len(fast_commands)) == (8 * 25, 8 * 13)
    assert np.abs(fast.observation.proprio - exact.observation.proprio)[:3].max() < 2e-3
    np.testing.assert_allclose(fast.observation.proprio, exact.observation.proprio, atol=0.02)


def test_what_nobody_touches_stays_where_it_is(env):
    env.reset(Start(0, physics="fast"))
    bodies = [env.domain.obj_body_id[name] for name in env.domain.objects_dict]
    before = env.domain.sim.data.body_xpos[bodies].copy()
    env.step_chunk(np.tile([0.0, 0.0, 0.3, 0.0, 0.0, 0.0, -1.0], (40, 1)))  # the hand goes up
    np.testing.assert_allclose(env.domain.sim.data.body_xpos[bodies], before, atol=1e-4)  # m


def test_an_exact_episode_is_the_same_after_a_fast_one(env):
    commands_before, before = played(env, "exact")
    env.reset(Start(1, physics="fast"))
    env.step_chunk(np.tile([0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0], (40, 1)))  # onto the table
    commands_after, after = played(env, "exact")
    np.testing.assert_array_equal(commands_before, commands_after)
    np.testing.assert_array_equal(before.observation.images, after.observation.images)
    assert env.domain.sim.model._model.geom_solref[:, 0].min() == 0.001  # of contacts, in s: robosuite's
