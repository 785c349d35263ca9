"""The policy's settings on lerobot's command line (`--policy.NAME=VALUE`)."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.optim import AdamWConfig

IMAGES = ("observation.images.image", "observation.images.image2")  # lerobot's names: agentview, wrist camera
IMAGE_SHAPE = (3, 256, 256)  # of the images that the policies were trained on


@PreTrainedConfig.register_subclass("vla_grpo")
@dataclass
class VlaGrpoConfig(PreTrainedConfig):
    """Settings of a policy of type vla_grpo."""

    # Folder or hub id in OpenVLA-OFT's format, or an adapter folder (RUN/checkpoints/best).
    checkpoint: str = ""
    task_suite: str | None = None  # whose statistics scale actions and proprio, if the checkpoint has several
    unnorm_key: str | None = None  # name of other statistics in the checkpoint
    num_images: int | None = None  # that the policy reads, if its checkpoint does not say
    mode: str = "greedy"  # or median; or l1: the actions of the L1 head, which greedy rounds to bins
    frozen_weights: str = "auto"  # auto: bf16 on a GPU, else float32; int8: half the memory of bf16

    def validate_features(self, num_images: int = 1) -> None:
        """Raise ValueError unless the first `num_images` cameras are there, with images of the size in training."""
        for name in IMAGES[:num_images]:
            if name not in self.image_features:
                raise ValueError(
                    f"the policy reads {name}, the env has {', '.join(self.image_features) or 'no image'}"
                )
            shape = self.image_features[name].shape
            if tuple(shape) != IMAGE_SHAPE:
                raise ValueError(
                    f"the policy reads images of 256 x 256 pixels, {name} has the shape {shape}: add "
                    "--env.observation_height=256 --env.observation_width=256"
                )

    @property
    def observation_delta_indices(self) -> None:
        return None

    @property
    def action_delta_indices(self) -> None:
        return None

    @property
    def reward_delta_indices(self) -> None:
        return None

    def get_optimizer_preset(self) -> AdamWConfig:
        raise NotImplementedError("vla_grpo policies are trained by train_grpo.py, lerobot evaluates them")

    def get_scheduler_preset(self) -> None:
        return None
