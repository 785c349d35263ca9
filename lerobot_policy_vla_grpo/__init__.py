"""OpenVLA-OFT policies in LeRobot: `lerobot-eval --policy.type=vla_grpo --policy.checkpoint=FOLDER`."""

from lerobot_policy_vla_grpo.configuration_vla_grpo import VlaGrpoConfig

__all__ = ["VlaGrpoConfig"]
