"""Leaving out what is not in view: the same pixels as MuJoCo draws of all geoms."""

import mujoco
import numpy as np
import pytest

from envs.libero import EnvSpec, LiberoEnv
from envs.observation import CAMERAS, IMAGE_SIZE
from envs.view import only_what_is_in_view, out_of_view

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


def test_only_boxes_wholly_beyond_an_edge_of_the_view_are_left_out():
    model, data = scene()
    assert {model.geom(index).name for index in out_of_view(model, data, 0)} == OUTSIDE


def test_geoms_are_back_in_their_groups_afterwards():
    model, data = scene()
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


@pytest.mark.parametrize(("suite", "task_id"), [("libero_spatial", 0), ("libero_10", 9)])
def test_frames_are_those_of_the_whole_scene_wherever_the_arm_is(suite, task_id):
    env = LiberoEnv(EnvSpec(suite, (task_id,)), task_id)
    env.reset(0)
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
