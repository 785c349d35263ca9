"""lerobot_policy_vla_grpo against lerobot itself, where that is installed: from what LIBERO gives to actions."""

import numpy as np
import pytest
import torch

from configs.presets import TINY_CHECKPOINT
from contracts import BadInput, Observation
from envs.libero import axis_angle
from envs.rendering import upright
from vla.loading import LoadOptions
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
def config():
    register_third_party_plugins()
    return PreTrainedConfig.get_choice_class("vla_grpo")(checkpoint=TINY_CHECKPOINT, device="cpu")


def raw_observations(count):
    """What LIBERO's env gives: pictures upside down, quaternions with w of either sign."""
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 256, (count, 256, 256, 3), np.uint8) for _ in range(2)]
    hand = draw.normal(size=(count, 4))
    hand /= np.linalg.norm(hand, axis=1, keepdims=True)
    eef = {"pos": draw.normal(size=(count, 3)), "quat": hand}
    robot = {"eef": eef, "gripper": {"qpos": draw.uniform(-0.04, 0.04, (count, 2))}}
    return {"pixels": {"image": images[0], "image2": images[1]}, "robot_state": robot}


def test_actions_of_a_chunk_are_those_of_the_policy_on_the_same_raw_observations(config):
    env, raw = LiberoEnv(task="libero_spatial", **SIZE), raw_observations(3)
    policy = make_policy(config, env_cfg=env)
    before, after = make_pre_post_processors(config)
    of_env, to_env = make_env_pre_post_processors(env, config)
    batch = before(of_env({**preprocess_observation(raw), "task": [INSTRUCTION] * 3}))
    acted = [to_env({"action": after(policy.select_action(batch))})["action"] for _ in range(8)]

    robot = raw["robot_state"]
    proprio = np.concatenate(
        [
            robot["eef"]["pos"],
            np.stack([axis_angle(q) for q in robot["eef"]["quat"]]),
            robot["gripper"]["qpos"],
        ],
        1,
    )
    own = Policy.load(TINY_CHECKPOINT, LoadOptions(task_suite="libero_spatial", device="cpu"))
    seen = [
        Observation(upright(i)[None], p, INSTRUCTION)
        for i, p in zip(raw["pixels"]["image"], proprio, strict=True)
    ]
    assert torch.equal(torch.stack(acted, 1), torch.from_numpy(own.act(seen).actions))
    assert set(torch.stack(acted)[..., -1].unique().tolist()) <= {-1.0, 1.0}


def test_a_new_episode_begins_with_a_new_chunk(config):
    policy = make_policy(config, env_cfg=LiberoEnv(task="libero_spatial", **SIZE))
    first, second = (
        {f"observation.images.{name}": torch.full((1, 3, 256, 256), grey) for name in ("image", "image2")}
        | {"observation.state": torch.zeros(1, 8), "task": [INSTRUCTION]}
        for grey in (0.1, 0.9)
    )
    policy.select_action(first)
    policy.reset()
    assert torch.equal(policy.select_action(second), policy.predict_action_chunk(second)[:, 0])


def test_what_would_fail_later_is_refused(config):
    with pytest.raises(ValueError, match=r"256 x 256 pixels.*--env.observation_height=256"):
        make_policy(config, env_cfg=LiberoEnv(task="libero_spatial"))
    config.input_features, config.checkpoint = {}, ""
    with pytest.raises(BadInput, match=r"--policy\.checkpoint is missing"):
        make_policy(config, env_cfg=LiberoEnv(task="libero_spatial", **SIZE))
