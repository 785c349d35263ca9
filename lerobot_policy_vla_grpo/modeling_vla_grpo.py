"""The policy as lerobot uses it. lerobot asks for one action per env step; a new chunk is decided after the last."""

from collections import deque

import torch
from lerobot.policies import PreTrainedPolicy
from torch import Tensor

from contracts import BadInput, Observation
from lerobot_policy_vla_grpo.configuration_vla_grpo import IMAGES, VlaGrpoConfig
from vla.images import to_levels
from vla.load_options import LoadOptions
from vla.policy import Policy


class VlaGrpoPolicy(PreTrainedPolicy):
    """An OpenVLA-OFT policy that lerobot can evaluate but not train."""

    config_class = VlaGrpoConfig
    name = "vla_grpo"

    def __init__(self, config: VlaGrpoConfig, **_: object):
        """Load the checkpoint. Raises BadInput, and ValueError for images that the policy cannot read."""
        super().__init__(config)
        config.validate_features()
        if not config.checkpoint:
            raise BadInput(
                "--policy.checkpoint is missing: a folder or hub id of an OpenVLA-OFT policy, or an adapter"
            )
        if config.mode not in ("greedy", "median", "l1"):
            raise BadInput(f"--policy.mode={config.mode}: there are greedy, median and l1")
        options = LoadOptions(
            task_suite=config.task_suite,
            unnorm_key=config.unnorm_key,
            num_images=config.num_images,
            device=config.device,
            frozen_weights=config.frozen_weights,
        )
        self.policy = Policy.load(config.checkpoint, options)
        if config.mode == "l1" and not self.policy.can_act_by_l1:
            raise BadInput(
                f"--policy.mode=l1: {config.checkpoint} has no L1 head to act by; use --policy.mode=greedy"
            )
        config.validate_features(self.policy.num_images)
        self.reset()

    def reset(self) -> None:
        """Called by lerobot at the start of an episode: drop what is left of the last chunks."""
        self._actions: deque[Tensor] = deque()  # (num_envs, action_dim) each

    def select_action(self, batch: dict, **_: object) -> Tensor:
        """The next action, (num_envs, action_dim) float64. batch: see `predict_action_chunk`."""
        if not self._actions:
            self._actions.extend(self.predict_action_chunk(batch).unbind(1))
        return self._actions.popleft()

    def predict_action_chunk(self, batch: dict, **_: object) -> Tensor:
        """Decide a chunk for each env, (num_envs, chunk_length, action_dim) float64 in LIBERO's units.

        batch: images (num_envs, 3, 256, 256) under the names IMAGES, float32 from 0 to 1 or uint8; "observation.state";
        "task".
        """
        images = torch.stack([batch[name] for name in IMAGES[: self.policy.num_images]], dim=1)
        levels = to_levels(images.permute(0, 1, 3, 4, 2).numpy(force=True))
        states = batch["observation.state"].double()
        observations = [
            Observation(frames, state.numpy(force=True), task)
            for frames, state, task in zip(levels, states, batch["task"], strict=True)
        ]
        return torch.from_numpy(self.policy.act(observations, self.config.mode).actions)

    def get_optim_params(self) -> dict:
        raise NotImplementedError("vla_grpo policies are trained by train_grpo.py, lerobot evaluates them")

    def forward(self, batch: dict) -> tuple[Tensor, dict | None]:
        raise NotImplementedError("vla_grpo policies are trained by train_grpo.py, lerobot evaluates them")
