"""Exact speed-ups, part by part: the pixels of what is in view, and textures that are loaded once."""

from pathlib import Path

import mujoco
import numpy as np
import pytest

from envs.env import IMAGE_SIZE, EnvSpec, Start
from envs.libero import CAMERAS, LiberoEnv
from envs.libero_imports import prepare_imports

prepare_imports()
from envs.lean import load_lean, only_what_is_in_view, out_of_view  # noqa: E402 - needs `prepare_imports`

# The camera is at the origin and looks down (-z) at a square view with a slope of 1 at each side.
SCENE = """
<mujoco>
  <asset><material name="mirror" reflectance="{reflectance}"/></asset>
  <worldbody>
    <light castshadow="{castshadow}"/>
    <camera name="down" fovy="90"/>
    <geom name="floor" type="plane" size="0 0 1" pos="0 0 -2" material="mirror"/>
    <geom name="middle" type="box" size=".1 .1 .1" pos="0 0 -1"/>
    <geom name="behind" type="box" size=".1 .1 .1" pos="0 0 1"/>
    <geom name="just_outside" type="box" size=".1 .1 .1" pos="1.22 0 -1"/>
    <geom name="corner_inside" type="box" size=".1 .1 .1" pos="1.18 0 -1"/>
    <geom name="turned_outside" type="box" size=".1 .1 .1" pos="0 1.18 -1" euler="45 0 0"/>
    <geom name="around_the_camera" type="sphere" size="3"/>
  </worldbody>
</mujoco>
"""
OUTSIDE = {"behind", "just_outside", "turned_outside"}


def scene(reflectance=0.0, castshadow="false"):
    model = mujoco.MjModel.from_xml_string(SCENE.format(reflectance=reflectance, castshadow=castshadow))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def test_only_boxes_wholly_beyond_an_edge_of_the_view_are_left_out_and_come_back():
    model, data = scene()
    assert {model.geom(index).name for index in out_of_view(model, data, 0)} == OUTSIDE
    groups = model.geom_group.copy()
    with only_what_is_in_view(model, data, 0):
        assert (model.geom_group != groups).sum() == len(OUTSIDE)
    np.testing.assert_array_equal(model.geom_group, groups)


@pytest.mark.parametrize("what", [{"reflectance": 0.5}, {"castshadow": "true"}])
def test_with_mirrors_or_shadows_everything_is_drawn(what):
    model, data = scene(**what)
    groups = model.geom_group.copy()
    with only_what_is_in_view(model, data, 0):
        np.testing.assert_array_equal(model.geom_group, groups)


def test_frames_are_those_of_the_whole_scene_wherever_the_arm_is():
    env = LiberoEnv(EnvSpec("libero_10", (9,)), 9)
    env.reset(Start(0))
    sim = env.domain.sim
    model, data = sim.model._model, sim.data._data
    limits, random = model.jnt_range[:7], np.random.default_rng(0)
    hidden = []
    for _ in range(6):
        data.qpos[:7] = random.uniform(*limits.T)
        mujoco.mj_forward(model, data)
        for name in CAMERAS:
            camera = model.camera(name).id
            whole = sim.render(camera_name=name, width=IMAGE_SIZE, height=IMAGE_SIZE)
            with only_what_is_in_view(model, data, camera):
                part = sim.render(camera_name=name, width=IMAGE_SIZE, height=IMAGE_SIZE)
            hidden.append(len(out_of_view(model, data, camera)))
            np.testing.assert_array_equal(part, whole)
    env.close()
    assert min(hidden) > 10


def test_a_texture_of_two_materials_is_loaded_once():
    texture = (
        '<texture name="{}" type="{}" builtin="flat" width="6" height="6"/><material name="{}" texture="{}"/>'
    )
    kinds = {"one": "2d", "same": "2d", "other": "cube"}
    assets = "".join(texture.format(name, kind, name, name) for name, kind in kinds.items())
    model = load_lean(f"<mujoco><asset>{assets}</asset></mujoco>", pack=Path("none")).model
    used = {
        name: model.mat_texid[model._model.material(name).id, mujoco.mjtTextureRole.mjTEXROLE_RGB]
        for name in kinds
    }
    assert model.ntex == 2
    assert used["one"] == used["same"] != used["other"]
