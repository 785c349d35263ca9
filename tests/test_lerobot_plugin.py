"""lerobot_policy_vla_grpo against lerobot itself, where that is installed: from what LIBERO gives to actions."""

import numpy as np
import pytest
import torch

from contracts import Observation
from envs.libero import upright
from envs.libero_imports import prepare_imports
from vla.load_options import LoadOptions
from vla.policy import Policy

pytest.importorskip("lerobot", reason="lerobot is not installed: lerobot_policy_vla_grpo/README.md")
from lerobot.configs import PreTrainedConfig
from lerobot.envs import make_env_pre_post_processors, preprocess_observation
from lerobot.envs.configs import LiberoEnv
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.utils.import_utils import register_third_party_plugins

SIZE = {"observation_height": 256, "observation_width": 256}
INSTRUCTION = "pick up the black bowl next to the ramekin and place it on the plate"


@pytest.fixture
def config(small):
    """Of a checkpoint that reads both images and the robot state."""
    register_third_party_plugins()
    kind = PreTrainedConfig.get_choice_class("vla_grpo")
    return kind(checkpoint=str(small), task_suite="libero_spatial", device="cpu")


def raw_observations(count: int) -> dict:
    """What LIBERO's env gives: pictures upside down, quaternions with w of either sign."""
    random = np.random.default_rng(0)
    agentview = random.integers(0, 256, (count, 256, 256, 3), np.uint8)
    wrist = random.integers(0, 256, (count, 256, 256, 3), np.uint8)
    position = random.normal(size=(count, 3))
    quaternion = random.normal(size=(count, 4))
    quaternion /= np.linalg.norm(quaternion, axis=1, keepdims=True)
    finger_joints = random.uniform(-0.04, 0.04, (count, 2))
    return {
        "pixels": {"image": agentview, "image2": wrist},
        "robot_state": {"eef": {"pos": position, "quat": quaternion}, "gripper": {"qpos": finger_joints}},
    }


def observations_of(raw: dict) -> list[Observation]:
    """The same as the project's own env gives them."""
    prepare_imports()
    from robosuite.utils.transform_utils import quat2axisangle

    robot = raw["robot_state"]
    observations = []
    cameras = zip(raw["pixels"]["image"], raw["pixels"]["image2"], strict=True)
    for i, (agentview, wrist) in enumerate(cameras):
        rotation = quat2axisangle(robot["eef"]["quat"][i].copy())
        proprio = np.concatenate([robot["eef"]["pos"][i], rotation, robot["gripper"]["qpos"][i]])
        images = np.stack([upright(agentview), upright(wrist)])
        observations.append(Observation(images, proprio, INSTRUCTION))
    return observations


def test_actions_of_a_chunk_are_those_of_the_policy_on_the_same_raw_observations(config, small):
    env = LiberoEnv(task="libero_spatial", **SIZE)
    raw = raw_observations(3)
    lerobot_policy = make_policy(config, env_cfg=env)
    policy_input, policy_output = make_pre_post_processors(config)
    env_output, env_input = make_env_pre_post_processors(env, config)
    batch = policy_input(env_output({**preprocess_observation(raw), "task": [INSTRUCTION] * 3}))
    actions = []
    for _ in range(8):
        action = policy_output(lerobot_policy.select_action(batch))
        actions.append(env_input({"action": action})["action"])

    policy = Policy.load(str(small), LoadOptions(task_suite="libero_spatial", device="cpu"))
    expected = policy.act(observations_of(raw)).actions
    assert torch.equal(torch.stack(actions, 1), torch.from_numpy(expected))
    assert set(torch.stack(actions)[..., -1].unique().tolist()) <= {-1.0, 1.0}


def batch_of_grey(level: float) -> dict:
    images = {
        f"observation.images.{name}": torch.full((1, 3, 256, 256), level) for name in ("image", "image2")
    }
    return images | {"observation.state": torch.zeros(1, 8), "task": [INSTRUCTION]}


def test_a_new_episode_begins_with_a_new_chunk(config):
    policy = make_policy(config, env_cfg=LiberoEnv(task="libero_spatial", **SIZE))
    policy.select_action(batch_of_grey(0.1))
    policy.reset()
    second = batch_of_grey(0.9)
    assert torch.equal(policy.select_action(second), policy.predict_action_chunk(second)[:, 0])
