"""Exact speed-ups, part by part: the controller's numbers, and every texture once."""

import mujoco
import numpy as np

from envs import rendering
from envs.libero import EnvSpec, LiberoEnv

rendering.prepare()
from envs.lean import lean_control, load_lean  # noqa: E402 - needs `prepare`


def commands(domain, control, actions) -> list[np.ndarray]:
    """Motor commands of every physics step; each action lasts three of them."""
    seen = []
    for action in actions:
        for substep in range(3):
            domain.sim.forward()
            control(action, policy_step=substep == 0)
            seen.append(domain.sim.data.ctrl.copy())
            domain.sim.step()
    return seen


def test_motor_commands_are_robosuites_to_the_bit():
    env = LiberoEnv(EnvSpec("libero_object", (0,), num_images=1), 0)
    env.reset(0)
    domain = env.domain
    actions = np.random.default_rng(0).uniform(-1.5, 1.5, (20, 7))
    outcomes = []
    for make_control in (lean_control, lambda domain: type(domain)._pre_action.__get__(domain)):
        env.reset(0)
        del domain.robots[0].controller.update  # robosuite's own shows through again
        outcomes.append(commands(domain, make_control(domain), actions))
    env.close()
    lean, original = outcomes
    np.testing.assert_array_equal(lean, original)
    assert np.ptp(lean, axis=0).min() > 0.0  # every motor was moved


def test_a_texture_of_two_materials_is_loaded_once():
    texture = '<texture name="{}" type="{}" builtin="flat" width="6" height="6"/><material name="{}" texture="{}"/>'
    kinds = {"one": "2d", "same": "2d", "other": "cube"}
    assets = "".join(texture.format(name, kind, name, name) for name, kind in kinds.items())
    model = load_lean(f"<mujoco><asset>{assets}</asset></mujoco>").model
    used = {
        name: model.mat_texid[model._model.material(name).id, mujoco.mjtTextureRole.mjTEXROLE_RGB] for name in kinds
    }
    assert model.ntex == 2
    assert used["one"] == used["same"] != used["other"]
