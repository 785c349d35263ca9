"""The small modules around the language model: projectors that make its input, and the L1 head that reads its output.

Attribute names are those of the reference model, as in `vla.model`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Projector(nn.Module):
    """Turns image features into tokens of the language model: (B, patches, vision_dim) -> (B, patches, llm_dim)."""

    def __init__(self, vision_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(vision_dim, 4 * vision_dim)
        self.fc2 = nn.Linear(4 * vision_dim, llm_dim)
        self.fc3 = nn.Linear(llm_dim, llm_dim)

    def forward(self, features: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class ProprioProjector(nn.Module):
    """Turns the robot's state into one token of the language model; a `.pt` file of its own holds its state dict."""

    def __init__(self, proprio_dim: int, llm_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(proprio_dim, llm_dim)
        self.fc2 = nn.Linear(llm_dim, llm_dim)
        self.proprio_dim = proprio_dim

    def forward(self, proprio: Tensor) -> Tensor:
        """Normalised proprio (B, proprio_dim) -> token (B, llm_dim)."""
        return self.fc2(F.gelu(self.fc1(proprio)))

    @staticmethod
    def sizes(state: dict[str, Tensor]) -> tuple[int, int]:
        """The arguments of the constructor, from a state dict."""
        llm_dim, proprio_dim = state["fc1.weight"].shape
        return proprio_dim, llm_dim


class ResidualBlock(nn.Module):
    """A layer of the L1 head: (..., dim) -> (..., dim)."""

    def __init__(self, dim: int):
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    """All layers of the L1 head: (..., input_dim) -> (..., output_dim)."""

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
        # In float32, because bfloat16 would round the actions to half a bin.
        return F.linear(self.layer_norm2(x).float(), self.fc2.weight.float(), self.fc2.bias.float())


class L1RegressionHead(nn.Module):
    """Predicts normalised actions from the hidden states at the action positions; it has a `.pt` file, too."""

    def __init__(self, num_blocks: int, llm_dim: int, hidden_dim: int, action_dim: int):
        super().__init__()
        # The input for one action is the concatenated hidden states of its `action_dim` tokens.
        self.model = ResidualMLP(num_blocks, llm_dim * action_dim, hidden_dim, action_dim)
        self.action_dim = action_dim

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (B, A, llm_dim) after the final norm -> (B, chunk_length, action_dim), not clipped to [-1, 1]."""
        batch, num_tokens, llm_dim = hidden.shape
        return self.model(hidden.reshape(batch, num_tokens // self.action_dim, self.action_dim * llm_dim))

    @staticmethod
    def sizes(state: dict[str, Tensor]) -> tuple[int, int, int, int]:
        """The arguments of the constructor, from a state dict."""
        hidden_dim, input_dim = state["model.fc1.weight"].shape
        action_dim = state["model.fc2.weight"].shape[0]
        num_blocks = len({key.split(".")[2] for key in state if key.startswith("model.mlp_resnet_blocks.")})
        return num_blocks, input_dim // action_dim, hidden_dim, action_dim
