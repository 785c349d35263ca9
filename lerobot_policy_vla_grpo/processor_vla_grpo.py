"""The processors that lerobot runs before and after the policy. They do nothing, because nothing is left to do.

lerobot's LiberoProcessorStep turns the images by 180 degrees and builds the state: position, axis-angle, finger joints.
The policy itself scales by the checkpoint's statistics and converts the sign of the gripper's action.
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
    """The processors before and after the policy. lerobot finds this function by its name."""
    after = PolicyProcessorPipeline(
        steps=[], to_transition=policy_action_to_transition, to_output=transition_to_policy_action
    )
    return PolicyProcessorPipeline(steps=[]), after
