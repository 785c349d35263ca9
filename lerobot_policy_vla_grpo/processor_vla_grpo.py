"""Processors that do nothing: nothing is left to do between lerobot's LIBERO and the policy.

LiberoProcessorStep turns the pictures by 180 degrees and makes the state: position, axis-angle, finger joints.
Scaling by the checkpoint's statistics and the sign of the gripper's action are part of the policy.
"""

from lerobot.processor import (
    PolicyProcessorPipeline,
    policy_action_to_transition,
    transition_to_policy_action,
)

from lerobot_policy_vla_grpo.configuration_vla_grpo import VlaGrpoConfig


def make_vla_grpo_pre_post_processors(
    config: VlaGrpoConfig, dataset_stats: object = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Called by lerobot: the processors before and after the policy."""
    before = PolicyProcessorPipeline(steps=[])
    after = PolicyProcessorPipeline(
        steps=[],
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return before, after
