"""Nothing is left to do between lerobot's LIBERO and the policy.

Its LiberoProcessorStep turns the pictures by 180 degrees and makes the state: position, axis-angle, finger joints.
Scaling by the checkpoint's statistics and the gripper's sign are the policy's own.
"""

from typing import Any

from lerobot.processor import (
    PolicyProcessorPipeline,
    policy_action_to_transition,
    transition_to_policy_action,
)

from lerobot_policy_vla_grpo.configuration_vla_grpo import VlaGrpoConfig


def make_vla_grpo_pre_post_processors(config: VlaGrpoConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    convert = {"to_transition": policy_action_to_transition, "to_output": transition_to_policy_action}
    return PolicyProcessorPipeline(steps=[]), PolicyProcessorPipeline(steps=[], **convert)
