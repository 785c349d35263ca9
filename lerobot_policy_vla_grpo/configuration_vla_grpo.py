"""What lerobot's command line can set of the policy."""

from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.optim import AdamWConfig

IMAGES = ("observation.images.image", "observation.images.image2")  # of lerobot's LIBERO: agentview, wrist
IMAGE_SHAPE = (3, 256, 256)  # of the pictures that the policies were trained on


@PreTrainedConfig.register_subclass("vla_grpo")
@dataclass
class VlaGrpoConfig(PreTrainedConfig):
    """`checkpoint` is a folder or hub id in OpenVLA-OFT's format, or a trained adapter's (RUN/checkpoints/best)."""

    checkpoint: str = ""
    task_suite: str = "libero_spatial"  # whose statistics scale actions and proprio
    unnorm_key: str | None = None  # the name of other statistics in the checkpoint
    mode: str = "greedy"  # or l1: the regression head of a checkpoint that has one
    frozen_weights: str = "auto"  # bf16 on a GPU, else float32; int8 or fp8: a 7B in half the memory

    def validate_features(self) -> None:
        """Raises ValueError for pictures of another size than the policy was trained on: they would be resampled."""
        shape = self.image_features[IMAGES[0]].shape
        if tuple(shape) != IMAGE_SHAPE:
            raise ValueError(
                f"the policy reads pictures of 256 x 256 pixels, these have {shape}: add "
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
