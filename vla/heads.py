"""The two small modules beside the network: the proprio projector and the L1 regression head.

Module and parameter names are those of openvla-oft @213c5ff (prismatic/models/projectors.py, action_heads.py), so that
their state dicts are the checkpoint's `.pt` files. Sizes are read from the tensors, not from a config.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ProprioProjector(nn.Module):
    """The robot's state as one more token of the language model."""

    def __init__(self, proprio_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)

    @property
    def proprio_dim(self) -> int:
        return self.fc1.in_features

    def forward(self, proprio: Tensor) -> Tensor:
        """(B, proprio_dim) normalised -> (B, llm_dim)"""
        return self.fc2(F.gelu(self.fc1(proprio)))

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "ProprioProjector":
        """Raises KeyError or RuntimeError when the tensors are not those of a proprio projector."""
        llm_dim, proprio_dim = state["fc1.weight"].shape
        return _filled(cls, (proprio_dim, llm_dim), state)


class ResidualBlock(nn.Module):
    """x + ReLU(Linear(LayerNorm(x)))"""

    def __init__(self, dim: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    def __init__(self, num_blocks: int, input_dim: int, hidden_dim: int, output_dim: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(input_dim)
        self.fc1 = nn.Linear(input_dim, hidden_dim)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(hidden_dim) for _ in range(num_blocks))
        self.layer_norm2 = nn.LayerNorm(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, output_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1RegressionHead(nn.Module):
    """Hidden states at the action positions -> continuous normalised actions, trained with the L1 loss."""

    def __init__(self, num_blocks: int, llm_dim: int, hidden_dim: int, action_dim: int):
        super().__init__()
        # One action is read from the states of its `action_dim` tokens, concatenated.
        self.model = ResidualMLP(num_blocks, llm_dim * action_dim, hidden_dim, action_dim)

    @property
    def action_dim(self) -> int:
        return self.model.fc2.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, A, llm_dim) after the final norm -> (B, chunk_length, action_dim), not clipped to [-1, 1]"""
        batch, num_tokens, llm_dim = hidden.shape
        return self.model(hidden.reshape(batch, num_tokens // self.action_dim, self.action_dim * llm_dim))

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor]) -> "L1RegressionHead":
        """Raises KeyError or RuntimeError when the tensors are not those of an L1 regression head."""
        hidden_dim, input_dim = state["model.fc1.weight"].shape
        action_dim = state["model.fc2.weight"].shape[0]
        num_blocks = len({key.split(".")[2] for key in state if key.startswith("model.mlp_resnet_blocks.")})
        return _filled(cls, (num_blocks, input_dim // action_dim, hidden_dim, action_dim), state)


Head = TypeVar("Head", bound=nn.Module)


def _filled(cls: type[Head], sizes: tuple[int, ...], state: dict[str, Tensor]) -> Head:
    with torch.device("meta"):
        module = cls(*sizes)
    module.load_state_dict(state, assign=True)
    return module.eval()
