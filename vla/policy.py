"""The policy: observations in, action chunks and their log-probabilities out.

This is the only door through which training and evaluation use the model. Sampling (`act`) and learning
(`chunk_logits`) take the logits from one function, so they cannot disagree about what the policy is.
"""

import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from contracts import BadInput, Observation, first_line
from vla import eight_bits, lora
from vla.checkpoint import CheckpointInfo, base_and_adapter, inspect_checkpoint
from vla.cuda_graphs import GraphedNetwork
from vla.dataset_statistics import STATISTICS_FILE, same_actions, same_statistics, select_key, unnormalise
from vla.hub import resolve_checkpoint
from vla.model import L1RegressionHead, OpenVLAOFT
from vla.network_io import check_dimensions, load_action_head, load_network
from vla.preprocessing import ImageProcessor, Inputs
from vla.prompts import load_tokenizer
from vla.tokens import (
    FIRST_ACTION_TOKEN,
    NUM_BINS,
    decode,
    encode,
    sample_tokens,
    to_env,
    token_logprobs,
    translate,
)
from vla.weights import fingerprint

log = logging.getLogger(__name__)
Mode = Literal["greedy", "sample", "l1"]
FrozenWeights = Literal["auto", "float32", "bf16", "int8", "fp8"]

WORTH_COMPILING = 1_000_000_000  # parameters: compiling takes a minute and more, for a small network, too
LARGE_CHECKPOINT_BYTES = 2 * 2**30  # of weights: more are not run on a CPU unless --device cpu says so


@dataclass(frozen=True)
class Acted:
    """A chunk per observation; tensors are on the CPU."""

    tokens: Tensor  # (B, A) int64, ids 31744..31999; A = chunk_length * action_dim, time-major
    logprobs: Tensor  # (B, A) float32, of the tokens at the given temperature
    actions: np.ndarray  # (B, chunk_length, action_dim) float64, ready for the env


class Policy:
    """Built by `Policy.load`. Adapters and proprio projector are float32 and trainable; all else is frozen."""

    token_logprobs = staticmethod(token_logprobs)

    def __init__(
        self, info: CheckpointInfo, network: OpenVLAOFT, action_head: L1RegressionHead | None, tokenizer: Tokenizer,
        processor: ImageProcessor, unnorm_key: str, base_model: str, compile: Literal["auto", "on", "off"],
        frozen_weights: str,
    ):  # fmt: skip
        self.info, self.network, self.action_head = info, network, action_head
        self.unnorm_key, self.base_model = unnorm_key, base_model
        self.device, self.frozen_weights = next(network.parameters()).device, frozen_weights
        self.base_fingerprint = fingerprint(info.weights.values())
        self.statistics = info.statistics[unnorm_key]
        self.action_dim = self.statistics.action.dim
        self.chunk_length = info.config.chunk_length
        self.num_images, self.uses_proprio, self.kind = info.num_images, info.uses_proprio, info.kind
        self._num_frozen = sum(math.prod(tensor.shape) for tensor in info.weights.values())
        proprio = self.statistics.proprio if info.uses_proprio else None
        self.model_inputs = Inputs(processor, tokenizer, info.num_images, proprio, self.device)
        self.prepare, self.view = self.model_inputs.prepare, self.model_inputs.view
        self._pretrained_proprio = deepcopy(network.proprio_projector)  # the teacher's
        if network.proprio_projector is not None:
            network.proprio_projector.requires_grad_(True)
        self._trainable = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        # Another policy, or other values of the trainable parameters; None: as pretrained.
        self._teacher: Policy | list[Tensor] | None = None
        self._forward: OpenVLAOFT | GraphedNetwork = network
        if compile != "off" and self.device.type == "cuda":
            self._forward = GraphedNetwork(network)
            compile = "on" if self._num_frozen >= WORTH_COMPILING else compile
        if compile == "on":
            network.compile_blocks()

    @classmethod
    def load(
        cls, checkpoint: str, *, task_suite: str, unnorm_key: str | None = None, device: str | torch.device = "auto",
        frozen_weights: FrozenWeights = "auto", lora_rank: int = 16, lora_alpha: int | None = None,
        adapter: str | None = None, seed: int = 0, compile: Literal["auto", "on", "off"] = "auto",
        memory_budget: float | None = None, statistics: str | None = None,
    ) -> "Policy":  # fmt: skip
        """A checkpoint (folder or hub id) with fresh adapters or those of `adapter`; or an adapter folder on its base.

        compile: torch.compile, on a GPU with whole passes as CUDA graphs; "auto": what pays. memory_budget: in GiB.
        statistics: a folder with those of demonstrations that it will learn from; None: its own. lora_alpha: None: the
        rank, so that the adapters' output is added as it is.
        """
        from vla.memory import limit_memory  # a module that knows policies

        base, adapter = base_and_adapter(checkpoint, adapter)
        device = choose_device(device, base)
        limit_memory(memory_budget, device)
        folder = resolve_checkpoint(base)
        info = inspect_checkpoint(folder, adapter=adapter, statistics=statistics)
        key = select_key(info.statistics, task_suite, unnorm_key)
        num_action_tokens = info.config.chunk_length * info.statistics[key].action.dim
        # Small files first: what is missing is missed before gigabytes are read.
        tokenizer, processor = load_tokenizer(folder), ImageProcessor.load(folder)
        trained = None if adapter is None else lora.read_adapter(Path(adapter))
        if trained is not None:
            lora_rank, lora_alpha = trained.rank, trained.alpha
        weights = choose_frozen_weights(frozen_weights, device, trained)
        exact = weights == "float32" or (weights != "bf16" and device.type == "cpu")
        dtype = torch.float32 if exact else torch.bfloat16  # of all that has not 8 bits
        try:
            network = load_network(info, num_action_tokens, device, dtype, eight_bits.FORMATS.get(weights))
            lora.add_lora(network, lora_rank, lora_rank if lora_alpha is None else lora_alpha, seed)
            action_head = load_action_head(info, device, dtype)
        except torch.OutOfMemoryError as error:
            repair = "close other programs on the GPU, raise --memory-budget, or use a GPU with more memory"
            raise BadInput(
                f"out of GPU memory while loading {checkpoint} ({first_line(error)}): {repair}"
            ) from None
        check_dimensions(info, key, action_head, network.proprio_projector)
        base_model = str(folder.resolve()) if Path(base).expanduser().is_dir() else base
        policy = cls(info, network, action_head, tokenizer, processor, key, base_model, compile, weights)
        if adapter is not None:
            policy.load_adapter(adapter)
        return policy

    @torch.no_grad()
    def act(
        self, observations: Sequence[Observation], mode: Mode = "greedy", temperature: float = 1.0,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Acted:  # fmt: skip
        """Decide one chunk per observation.

        greedy: argmax over the 256 action tokens; sample: one draw per position from softmax(logits / temperature), of
        a generator on the CPU per observation, whatever the batch; l1: the regression head's chunk, rounded to tokens.
        """
        logits, hidden = self.chunk_outputs(observations)
        if mode == "greedy":
            tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
        elif mode == "sample":
            tokens = sample_tokens(logits, temperature, generators)
        elif self.action_head is None:
            raise BadInput(f"{self.base_model} has no L1 head (action_head--*.pt): choose the greedy teacher")
        else:
            chunk = self.action_head(hidden).float().cpu().numpy()
            tokens = torch.from_numpy(encode(chunk)).flatten(1).to(hidden.device)
        logprobs = self.token_logprobs(logits, tokens, temperature).cpu()
        if not torch.isfinite(logprobs).all():
            repair = "resume from an earlier checkpoint, and in a new run lower --lr"
            raise BadInput(
                f"the policy's logits are not finite: training has diverged, or weights are damaged; {repair}"
            )
        return Acted(tokens.cpu(), logprobs, self.actions(tokens.cpu().numpy()))

    def chunk_logits(self, observations: Sequence[Observation]) -> Tensor:
        return self.chunk_outputs(observations)[0]

    def chunk_outputs(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """Logits (B, A, 256) float32, column v of id 31744 + v, and last hidden states (B, A, D); with gradient."""
        self.network.adapters.refresh()
        return self._forward(*self.model_inputs(observations))

    def logits_and_others(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """`chunk_logits`, and the log of the sum of exp over the logits of all other ids (B, A); with gradient."""
        logits, hidden = self.chunk_outputs(observations)
        head, end = self.network.language_model.lm_head, FIRST_ACTION_TOKEN + NUM_BINS
        words, fillers = (
            head.log_sum_exp(hidden, rows) for rows in (slice(FIRST_ACTION_TOKEN), slice(end, None))
        )
        return logits, torch.logaddexp(words, fillers)

    def actions(self, tokens: np.ndarray) -> np.ndarray:
        """Token ids (B, A) -> actions (B, chunk_length, action_dim) float64 in the env's units and conventions."""
        normalised = decode(tokens).reshape(len(tokens), self.chunk_length, self.action_dim)
        actions = unnormalise(normalised, self.statistics.action)
        # A last dimension that training did not normalise is a gripper, 0 or 1.
        return actions if self.statistics.action.mask[-1] else to_env(actions)

    def act_as_teacher(self, observations: Sequence[Observation], mode: Mode = "greedy") -> Acted:
        """What the teacher decides, in this policy's tokens: of another one's actions the nearest that they can say."""
        with self.teacher() as teacher:
            acted = teacher.act(observations, mode)
        own, others = self.statistics.action, teacher.statistics.action
        if same_actions(own, others):
            return acted
        shape = len(observations), self.chunk_length, self.action_dim
        tokens = translate(acted.tokens.numpy().reshape(shape), others, own).reshape(len(observations), -1)
        return Acted(torch.from_numpy(tokens), acted.logprobs, self.actions(tokens))

    def learn_from(self, teacher: "Policy") -> None:
        """Let another policy be the teacher. Raises BadInput unless it reads and decides the same things."""
        own, others = (
            f"{policy.num_images} image(s) of {policy.model_inputs.processor.image_size} pixels and "
            f"{'' if policy.uses_proprio else 'no '}proprio, and decides {policy.chunk_length} x {policy.action_dim} "
            f"numbers, normalised where {policy.statistics.action.mask.astype(int)} is 1"
            for policy in (self, teacher)
        )
        if own != others:
            raise BadInput(
                f"it reads {others}; the policy that it is to teach reads {own}: both must be the same"
            )
        self._teacher = teacher

    def learn_from_adapter(self, folder: str) -> bool:
        """Let a trained adapter be the teacher, on the same weights.

        False, and nothing is done, when it has another base, rank or data set.
        """
        adapter, layer = lora.read_adapter(Path(folder)), self.network.adapters.layers[0][1]
        found = adapter.base_fingerprint, adapter.rank, adapter.alpha
        if found != (self.base_fingerprint, layer.rank, layer.alpha):
            return False
        others = inspect_checkpoint(self.info.folder, adapter=folder).statistics.get(self.unnorm_key)
        if others is None or not same_statistics(self.statistics, others):
            return False
        own = self._trained_values()
        lora.fill_lora(self.network, adapter)
        self._teacher = self._trained_values()
        self._take_values(own)
        return True

    def _trained_values(self) -> list[Tensor]:
        return [parameter.detach().clone() for _, parameter in self._trainable]

    @torch.no_grad()
    def _take_values(self, values: list[Tensor]) -> None:
        torch._foreach_copy_([parameter for _, parameter in self._trainable], values)

    @contextmanager
    def teacher(self) -> Iterator["Policy"]:
        """The policy that decides as the teacher: by default this one, adapters off, pretrained proprio projector.

        May be nested; restores on exit.
        """
        if isinstance(self._teacher, Policy):
            yield self._teacher
            return
        if self._teacher is not None:
            own = self._trained_values()
            self._take_values(self._teacher)
            try:
                yield self
            finally:
                self._take_values(own)
            return
        before = self.network.proprio_projector
        self.network.proprio_projector = self._pretrained_proprio
        try:
            with lora.adapters_disabled(self.network):
                yield self
        finally:
            self.network.proprio_projector = before

    def is_teacher(self) -> bool:
        """Nothing is learned yet: greedy, this policy decides as its teacher, which is itself as it was."""
        if isinstance(self._teacher, list):
            return all(
                torch.equal(p, value) for (_, p), value in zip(self._trainable, self._teacher, strict=True)
            )
        if self._teacher is not None or any(p.any() for name, p in self._trainable if "lora_B" in name):
            return False
        projector, pretrained = self.network.proprio_projector, self._pretrained_proprio
        if projector is None or pretrained is None:
            return True
        return all(map(torch.equal, projector.parameters(), pretrained.parameters()))

    def recompute_everything(self) -> bool:
        """Recompute the activations of all blocks from now on; False when that is what it does already."""
        before, self.network.recomputed_blocks = self.network.recomputed_blocks, self.network.num_blocks
        return before < self.network.num_blocks

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Adapters and proprio projector, always in the same order."""
        return list(self._trainable)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Follow the steps of `optimizer`: layers keep copies of their adapters, and a fused one does not tell."""
        parameters = [parameter for _, parameter in self._trainable]
        optimizer.register_step_post_hook(lambda *_: torch.autograd.graph.increment_version(parameters))

    def save_adapter(self, folder: str | Path, looks: str = "") -> None:
        """Write what training has changed, and the name of the pictures that it saw."""
        base, seen = (
            (self.info.folder, self.base_model, self.base_fingerprint),
            {*self.info.looks, looks} - {""},
        )
        lora.save_adapter_folder(Path(folder), self.network, *base, self.frozen_weights, seen)
        if (
            own := self.info.statistics_folder
        ) != self.info.folder:  # it began at an adapter, or at demonstrations
            shutil.copyfile(own / STATISTICS_FILE, Path(folder) / STATISTICS_FILE)

    def load_adapter(self, folder: str | Path) -> None:
        """Read what `save_adapter` wrote. Raises BadInput when it was trained on another base."""
        adapter = lora.read_adapter(Path(folder))
        if adapter.base_fingerprint not in (None, self.base_fingerprint):
            found = f"{folder}: this adapter was trained on other weights ({adapter.base_model})"
            raise BadInput(f"{found} than those of {self.base_model}: give its own base")
        lora.fill_lora(self.network, adapter)

    def describe(self) -> list[tuple[str, str]]:
        """Rows of the table that is shown at start."""
        trainable = sum(p.numel() for _, p in self._trainable)
        return [
            ("checkpoint", self.base_model),
            ("kind", f"{self.kind}, {'with' if self.action_head is not None else 'without'} an L1 head"),
            ("reads", f"{self.num_images} image(s){' and proprio' * self.uses_proprio}"),
            ("statistics key", self.unnorm_key),
            ("chunk", f"{self.chunk_length} x {self.action_dim}"),
            ("parameters", f"{self._num_frozen:,} frozen, {self.frozen_weights}"),
            ("trainable", f"{trainable:,} in {len(self._trainable)} tensors, torch.float32"),
            (
                "recomputed",
                f"{self.network.recomputed_blocks} of {self.network.num_blocks} blocks in backward passes",
            ),
            ("device", str(self.device)),
        ]


def choose_frozen_weights(wanted: FrozenWeights, device: torch.device, adapter: lora.Adapter | None) -> str:
    """`auto`: 8 bits for an adapter that was trained on them, else what suits the device. Raises BadInput."""
    trained = None if adapter is None else adapter.frozen_weights
    if wanted == "auto":
        automatic = "bf16" if device.type == "cuda" else "float32"
        wanted = cast("FrozenWeights", trained if trained in eight_bits.FORMATS else automatic)
    if adapter is not None and trained != wanted and {trained, wanted} & eight_bits.FORMATS.keys():
        log.warning(
            "%s was trained on weights in %s: on %s it is another policy", adapter.folder, trained, wanted
        )
    eight_bits.check_device(wanted, device)
    return wanted


def choose_device(wanted: str | torch.device, checkpoint: str | None = None) -> torch.device:
    """`auto` and `cuda` are this process's GPU: of several ranks on a machine each has its own."""
    name, num_gpus = str(wanted), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (
        name == "auto"
        and num_gpus == 0
        and checkpoint is not None
        and is_large(Path(checkpoint).expanduser())
    ):
        found = f"{checkpoint} is a 7B policy and needs a CUDA GPU of 24 GB, but torch {torch.__version__} sees none"
        raise BadInput(f"{found}; `make demo` trains a small policy here (to force the CPU: --device cpu)")
    if name == "cpu" or (name == "auto" and num_gpus == 0):
        return torch.device("cpu")
    # With its number, because to some libraries "cuda" means the first.
    name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if name in ("auto", "cuda") else name
    if name not in {f"cuda:{index}" for index in range(num_gpus)}:
        repair = "check nvidia-smi and CUDA_VISIBLE_DEVICES, start no more processes than GPUs, or use --device cpu"
        raise BadInput(f"--device {wanted}: there is no {name}, torch sees {num_gpus} CUDA GPUs; {repair}")
    return torch.device(name)


def is_large(checkpoint: Path) -> bool:
    """Whether a base is too large for a CPU: a folder by its weights, a hub id always."""
    if checkpoint.is_dir():
        return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) > LARGE_CHECKPOINT_BYTES
    return (
        not checkpoint.is_absolute() and len(checkpoint.parts) == 2 and checkpoint.parts[0] != "checkpoints"
    )
