"""The policy: observations in, action chunks and their log-probabilities out.

This is the only door through which training and evaluation use the model. Sampling (`act`) and learning
(`chunk_logits`) take the logits from one function, so they cannot disagree about what the policy is.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from contracts import Observation
from errors import BadInput
from vla.adapter_folder import SAMPLES_FILE, load_proprio, save_adapter_folder
from vla.checkpoint import (
    CheckpointInfo,
    base_and_adapter,
    check_dimensions,
    folder_of_base,
    inspect_checkpoint,
    load_action_head,
    load_network,
)
from vla.cuda_graphs import GraphedNetwork
from vla.heads import L1RegressionHead
from vla.lora import (
    adapters_disabled,
    add_lora,
    check_base,
    fill_lora,
    num_frozen_parameters,
    read_adapter,
    refresh_adapters,
)
from vla.nf4 import num_in_4bit
from vla.openvla_oft import OpenVLAOFT
from vla.preprocessing import ImageProcessor, Inputs, write_observations
from vla.prompt import load_tokenizer
from vla.tokens import (
    FIRST_ACTION_TOKEN,
    DatasetStatistics,
    decode,
    encode,
    normalisation_of,
    sample_tokens,
    select_key,
    to_env,
    token_logprobs,
    unnormalise,
)
from vla.weights import fingerprint

if TYPE_CHECKING:
    from vla.data_parallel import Replicas
    from vla.sharding import Steps

Mode = Literal["greedy", "sample", "l1"]


@dataclass(frozen=True)
class Acted:
    """A chunk per observation; tensors are on the CPU."""

    tokens: Tensor  # (B, A) int64, ids 31744..31999; A = chunk_length * action_dim, time-major
    logprobs: Tensor  # (B, A) float32, of the tokens at the given temperature
    actions: np.ndarray  # (B, chunk_length, action_dim) float64, ready for the env


# Parameters of a network whose passes repay what compiling takes: a minute and more, for a small one, too.
WORTH_COMPILING = 1_000_000_000


class Policy:
    """Built by `Policy.load`. Adapters and proprio projector are float32 and trainable; all else is frozen."""

    token_logprobs = staticmethod(token_logprobs)

    def __init__(
        self,
        info: CheckpointInfo,
        network: OpenVLAOFT,
        action_head: L1RegressionHead | None,
        tokenizer: Tokenizer,
        processor: ImageProcessor,
        unnorm_key: str,
        base_model: str,
        compile_network: bool | None = False,
    ):
        self.info = info
        self.network = network
        self.action_head = action_head
        self.unnorm_key = unnorm_key
        self.base_model = base_model
        self.base_fingerprint = fingerprint(info.weights.values())
        self.statistics: DatasetStatistics = info.statistics[unnorm_key]
        self.action_dim = self.statistics.action.dim
        self.chunk_length = info.chunk_length(self.action_dim)
        self.num_images = info.num_images
        self.uses_proprio = info.uses_proprio
        self.kind = info.kind
        self.image_size = processor.image_size  # side in pixels of the images that the network sees
        self._normalisation = normalisation_of(self.action_dim)
        proprio = self.statistics.proprio if info.uses_proprio else None
        self.model_inputs = Inputs(processor, tokenizer, info.num_images, proprio, self._normalisation, self.device)
        self.prepare, self.view = self.model_inputs.prepare, self.model_inputs.view
        self._pretrained_proprio = deepcopy(network.proprio_projector)  # the teacher's
        if network.proprio_projector is not None:
            network.proprio_projector.requires_grad_(True)
        self._steps: Steps | None = None  # where the base is sharded
        self._trainable = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        self._forward: OpenVLAOFT | GraphedNetwork = network
        if compile_network is not False and self.device.type == "cuda":
            self._forward = GraphedNetwork(network)
            compile_network = compile_network or num_frozen_parameters(network) >= WORTH_COMPILING
        if compile_network:
            network.compile_blocks()
        self._is_teacher = False
        self.replicas: Replicas | None = None  # on further devices, see `vla.data_parallel.load_data_parallel`

    @classmethod
    def load(
        cls,
        checkpoint: str,
        *,
        task_suite: str,
        unnorm_key: str | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        lora_rank: int = 16,
        lora_alpha: int = 16,
        adapter: str | None = None,
        seed: int = 0,
        compile_network: bool | None = False,
        num_images: int | None = None,
        load_in_4bit: bool | None = None,
    ) -> "Policy":
        """Load a checkpoint (folder or hub id), put fresh adapters on it or the trained ones of folder `adapter`.

        checkpoint may itself be an adapter folder: then its base is loaded under it. compile_network: torch.compile, on
        a GPU with whole passes as CUDA graphs; None: what pays, on a GPU. num_images overrides what the checkpoint is
        found to be. load_in_4bit: round the language model's blocks to NF4 (`vla.nf4`); None: if the
        adapter was trained on such a base. Raises BadInput in one line for everything that the user can repair.
        """
        device = torch.device(device)
        base, adapter = base_and_adapter(checkpoint, adapter)
        folder = folder_of_base(base, adapter)
        info = inspect_checkpoint(folder, num_images)
        key = select_key(info.statistics, task_suite, unnorm_key)
        action_dim = info.statistics[key].action.dim
        # Small files first: what is missing is missed before gigabytes are read.
        tokenizer, processor = load_tokenizer(folder), ImageProcessor.load(folder)
        trained = None if adapter is None else read_adapter(Path(adapter))
        network = load_network(info, info.chunk_length(action_dim) * action_dim, device, dtype)
        if trained is None:
            add_lora(network, lora_rank, lora_alpha, seed)
        else:
            add_lora(network, trained.rank, trained.alpha, seed, trained.targets)
        action_head = load_action_head(info, device, dtype)
        check_dimensions(info, key, action_head, network.proprio_projector)
        base_model = str(folder.resolve()) if os.path.isdir(os.path.expanduser(base)) else base
        policy = cls(info, network, action_head, tokenizer, processor, key, base_model, compile_network)
        if adapter is not None:
            policy.load_adapter(adapter)
        return policy

    @property
    def hidden_dim(self) -> int:
        """D, the width of the language model."""
        return self.network.language_model.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the frozen weights."""
        return self.network.dtype

    @property
    def precision(self) -> str:
        """The same in words: "bfloat16", or "nf4, bfloat16" where the language model's blocks are in 4 bits."""
        name = str(self.dtype).removeprefix("torch.")
        return f"nf4, {name}" if num_in_4bit(self.network) else name

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def is_alone(self) -> bool:
        """Whether no other device or process takes part in a pass: one that failed can then be run again."""
        return self.replicas is None and self._steps is None

    @property
    def devices(self) -> list[torch.device]:
        """All that the policy runs on, the one that holds outputs and trainable parameters first."""
        return [self.device] if self.replicas is None else self.replicas.devices

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Observation],
        mode: Mode = "greedy",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Acted:
        """Decide one chunk per observation.

        greedy: argmax over the 256 action tokens; sample: one draw per position from softmax(logits / temperature);
        l1: the regression head's chunk, rounded to tokens. With one CPU generator per observation a draw depends on
        that generator and that observation alone, not on the batch around it.
        """
        logits, hidden = self.chunk_outputs(observations, needs_hidden=mode == "l1")
        if mode == "greedy":
            tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
        elif mode == "sample":
            tokens = sample_tokens(logits, temperature, generators)
        else:
            tokens = self._l1_tokens(hidden)
        logprobs = self.token_logprobs(logits, tokens, temperature).cpu()
        if not torch.isfinite(logprobs).all():
            raise BadInput(
                "the policy's logits are not finite: its training has diverged, or its weights are damaged; resume "
                "from an earlier checkpoint, and in a new run lower --lr"
            )
        return Acted(tokens.cpu(), logprobs, self.actions(tokens.cpu().numpy()))

    def chunk_logits(self, observations: Sequence[Observation]) -> Tensor:
        """Logits (B, A, 256) float32, with gradient to the trainable parameters; column v is token id 31744 + v."""
        return self.chunk_outputs(observations, needs_hidden=False)[0]

    def actions(self, tokens: np.ndarray) -> np.ndarray:
        """Token ids (B, A) -> actions (B, chunk_length, action_dim) float64 in the env's units and conventions."""
        normalised = decode(tokens).reshape(len(tokens), self.chunk_length, self.action_dim)
        actions = unnormalise(normalised, self.statistics.action, self._normalisation)
        # A last dimension that training did not normalise is a gripper, 0 or 1.
        return actions if self.statistics.action.mask[-1] else to_env(actions)

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """The pretrained policy: adapters off, pretrained proprio projector. May be nested; restores on exit."""
        before = self.network.proprio_projector, self._is_teacher
        self.network.proprio_projector, self._is_teacher = self._pretrained_proprio, True
        try:
            with adapters_disabled(self.network):
                yield
        finally:
            self.network.proprio_projector, self._is_teacher = before

    def recompute(self, num_blocks: int) -> None:
        """Recompute the activations of the first `num_blocks` blocks in backward passes, on all devices."""
        self.network.recompute(num_blocks)
        if self.replicas is not None:
            self.replicas.recompute(num_blocks)

    def recompute_everything(self) -> bool:
        """Recompute the activations of all blocks from now on; False when that is what it does already."""
        if self.network.recomputed_blocks == self.network.num_blocks:
            return False
        self.recompute(self.network.num_blocks)
        return True

    def shard(self, device: torch.device) -> None:
        """Move the policy to `device`, its frozen blocks spread over all processes of torch.distributed.

        From now on all processes must run the network equally often; see `keeping_step`.
        """
        from vla.sharding import Steps, shard_blocks  # seconds of imports that few runs need

        shard_blocks(self.network, device)
        for part in (self.network, self.action_head, self._pretrained_proprio):
            if part is not None:
                part.to(device)
        refresh_adapters(self.network, force=True)
        self.model_inputs.to(device)
        self._forward = self.network  # no recorded passes: blocks come and go
        self._steps = Steps(self.network)

    def keeping_step(self) -> AbstractContextManager[None]:
        """A block in which processes that share a base may differ in how often they act."""
        return nullcontext() if self._steps is None else self._steps.together()

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Adapters and proprio projector, always in the same order."""
        return list(self._trainable)

    def reduce_gradients(self) -> None:
        """After the backward passes of an optimizer step: bring the gradients of all devices together."""
        if self.replicas is not None:
            self.replicas.reduce_gradients()

    def parameters_changed(self) -> None:
        """To be called after every optimizer step: layers keep copies of their adapters, and so do other devices."""
        torch.autograd.graph.increment_version([p for _, p in self._trainable])  # a fused optimizer does not tell
        if self.replicas is not None:
            self.replicas.broadcast_parameters()

    def save_adapter(self, folder: str | Path, samples: Sequence[Observation] = ()) -> None:
        """Write everything that training has changed, and what is needed to run it together with its base.

        samples: a few observations of the run, on which a later merge is checked (`python -m vla.merge`).
        """
        save_adapter_folder(Path(folder), self.network, self.info.folder, self.base_model, self.base_fingerprint)
        if samples:
            write_observations(Path(folder) / SAMPLES_FILE, samples)

    def load_adapter(self, folder: str | Path) -> None:
        """Read what `save_adapter` wrote. Raises BadInput when it was trained on another base."""
        adapter = read_adapter(Path(folder))
        check_base(adapter, self.base_fingerprint, self.base_model)
        fill_lora(self.network, adapter)
        load_proprio(self.network, Path(folder))
        self.parameters_changed()

    def describe(self) -> list[tuple[str, str]]:
        """Rows of the table that is shown at start."""
        trainable = sum(p.numel() for _, p in self._trainable)
        in_4bit = f", {count:,} of them in 4 bits (NF4)" if (count := num_in_4bit(self.network)) else ""
        return [
            ("checkpoint", self.base_model),
            ("kind", self.kind),
            ("images", str(self.num_images)),
            ("proprio", "yes" if self.uses_proprio else "no"),
            ("L1 head", "yes" if self.action_head is not None else "no"),
            ("statistics key", self.unnorm_key),
            ("chunk", f"{self.chunk_length} x {self.action_dim}"),
            ("parameters", f"{num_frozen_parameters(self.network):,} frozen, {self.network.dtype}{in_4bit}"),
            ("trainable", f"{trainable:,} in {len(self._trainable)} tensors, torch.float32"),
            ("recomputed", f"{self.network.recomputed_blocks} of {self.network.num_blocks} blocks in backward passes"),
            ("devices", ", ".join(map(str, self.devices))),
        ]

    def chunk_outputs(
        self, observations: Sequence[Observation], needs_hidden: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """The one path from observations to logits (B, A, 256) and last hidden states (B, A, D), with gradient.

        The hidden states may be None unless `needs_hidden`: those of other devices are fetched on demand.
        """
        if self.replicas is None:
            return self._own_outputs(observations)
        return self.replicas.chunk_outputs(self._own_outputs, observations, self._is_teacher, needs_hidden)

    def _own_outputs(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        refresh_adapters(self.network)
        return self._forward(*self.model_inputs(observations))

    def _l1_tokens(self, hidden: Tensor | None) -> Tensor:
        if self.action_head is None:
            raise BadInput(f"{self.base_model} has no L1 head (action_head--*.pt): choose the greedy teacher")
        assert hidden is not None, "`act` asks for them"
        chunk = self.action_head(hidden).float().cpu().numpy()
        return torch.from_numpy(encode(chunk)).flatten(1).to(hidden.device)
