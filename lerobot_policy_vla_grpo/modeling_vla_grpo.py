"""The policy as lerobot calls it: once in every env step. It decides a new chunk when the last one is used up."""

from collections import deque

import torch
from lerobot.policies import PreTrainedPolicy
from torch import Tensor

from contracts import BadInput, Observation
from lerobot_policy_vla_grpo.configuration_vla_grpo import IMAGES, VlaGrpoConfig
from vla.loading import LoadOptions
from vla.policy import Policy


class VlaGrpoPolicy(PreTrainedPolicy):
    config_class = VlaGrpoConfig
    name = "vla_grpo"

    def __init__(self, config: VlaGrpoConfig, **_: object):
        super().__init__(config)
        config.validate_features()
        if not config.checkpoint:
            raise BadInput(
                "--policy.checkpoint is missing: a folder or hub id of an OpenVLA-OFT policy, or an adapter"
            )
        options = LoadOptions(
            task_suite=config.task_suite,
            unnorm_key=config.unnorm_key,
            device=config.device,
            frozen_weights=config.frozen_weights,
        )
        self.policy = Policy.load(config.checkpoint, options)
        self.reset()

    def reset(self) -> None:
        """A new episode begins with a new chunk."""
        self._actions: deque[Tensor] = deque()  # what is left of the chunks, (num_envs, action_dim) each

    def select_action(self, batch: dict, **_: object) -> Tensor:
        """The next action (num_envs, action_dim) float64 of the chunks."""
        if not self._actions:
            self._actions.extend(self.predict_action_chunk(batch).unbind(1))
        return self._actions.popleft()

    def predict_action_chunk(self, batch: dict, **_: object) -> Tensor:
        """(num_envs, chunk_length, action_dim) float64 in LIBERO's own units: -1 opens the gripper, 1 closes it.

        batch: images float32 (num_envs, 3, 256, 256) from 0 to 1 under the names IMAGES, "observation.state", "task".
        """
        images = torch.stack([batch[name] for name in IMAGES[: self.policy.num_images]], dim=1)
        images = (images * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2)  # lerobot divided them by 255
        states = batch["observation.state"].double()
        observations = [
            Observation(frames.numpy(force=True), state.numpy(force=True), task)
            for frames, state, task in zip(images, states, batch["task"], strict=True)
        ]
        return torch.from_numpy(self.policy.act(observations, self.config.mode).actions)

    def get_optim_params(self) -> dict:
        raise NotImplementedError("vla_grpo policies are trained by train_grpo.py, lerobot evaluates them")

    def forward(self, batch: dict) -> tuple[Tensor, dict | None]:
        raise NotImplementedError("vla_grpo policies are trained by train_grpo.py, lerobot evaluates them")
