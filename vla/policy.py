"""The policy: takes observations, returns action chunks and their log-probabilities.

Acting (`act`) and learning (`chunk_logits`) get the logits from the same function, so that both use the same policy.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contracts import BadInput, Observation
from vla.adapter_folder import copy_into_network, read_adapter, write_adapter
from vla.cuda_graphs import GraphedNetwork, Part
from vla.dataset_statistics import STATISTICS_FILE, has_libero_gripper, scale_digest, unnormalise
from vla.kept_states import KeptStates, TrunkStates, join_rows, split_rows, store
from vla.load_options import LoadOptions, Mode
from vla.loading import PolicyParts, load_parts
from vla.model import configure_compiler
from vla.optimizer import make_optimizer
from vla.preprocessing import Inputs
from vla.teacher import Snapshot, WithoutAdapters
from vla.tokens import (
    FIRST_ACTION_TOKEN,
    decode,
    encode,
    median_tokens,
    sample_tokens,
    to_env,
    token_logprobs,
)
from vla.weights import fingerprint, pt_fingerprint

log = logging.getLogger(__name__)

# Number of parameters from which --compile auto compiles. Compiling takes a minute or more even for a small network.
WORTH_COMPILING = 1_000_000_000


@dataclass(frozen=True)
class Acted:
    """One chunk per observation. Tensors are on the CPU."""

    tokens: Tensor  # (B, A) int64, ids 31744..31999; A = chunk_length * action_dim, time-major
    logprobs: Tensor  # (B, A) float32, the tokens' log-probs at the given temperature
    actions: np.ndarray  # (B, chunk_length, action_dim) float64, ready for the env
    # What a frozen trunk (`vla.model`) computed, so that later calls which get it as `kept` compute the top alone; None
    # for each observation where the trunk is trained, or nothing is kept
    kept: KeptStates


class Policy:
    """A loaded policy (see `load`).

    The adapters are float32 and trainable; so is the proprio projector, unless the trunk is frozen. All else is frozen.
    """

    def __init__(self, parts: PolicyParts):
        info = parts.info
        options = parts.options
        network = parts.network
        self.info = info
        self.network = network
        self.l1_head = parts.l1_head
        # Whether tokens are drawn around the L1 head's actions, which then are the greedy tokens' actions
        self.is_laplace = network.l1_head is not None
        # An adapter that was trained on tokens has changed what the head reads.
        self.can_act_by_l1 = parts.l1_head is not None and (parts.adapter is None or self.is_laplace)
        self.unnorm_key = parts.unnorm_key
        # The key that the flag or the adapter names; None: the suite decides
        self.fixed_unnorm_key = options.unnorm_key
        self.base_model = parts.base_model
        self.frozen_weights = options.frozen_weights
        self.device = next(network.parameters()).device
        self.base_fingerprint = fingerprint(info.weights.values())
        self.head_fingerprint = pt_fingerprint(info.action_head_file)
        self.statistics = info.statistics[parts.unnorm_key]
        self.action_dim = self.statistics.action.dim
        self._has_libero_gripper = has_libero_gripper(self.statistics.action, options.task_suite)
        self.chunk_length = info.config.chunk_length
        self.num_images = info.num_images
        self.num_frozen = sum(math.prod(tensor.shape) for tensor in info.weights.values())
        proprio = self.statistics.proprio if info.uses_proprio else None
        self.model_inputs = Inputs(parts.processor, parts.tokenizer, info.num_images, proprio, self.device)
        self._teacher: WithoutAdapters | Snapshot = WithoutAdapters(network)
        # Where a frozen trunk's hidden states are kept; None: nowhere. `vla.memory.plan_update` may change it.
        self.kept_on: torch.device | None = self.device
        if network.proprio_projector is not None and network.trained_blocks is None:
            network.proprio_projector.requires_grad_(True)
        self._trainable = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        uses_graphs = options.compile != "off" and self.device.type == "cuda"
        is_compiled = options.compile == "on" or (uses_graphs and self.num_frozen >= WORTH_COMPILING)
        self._graphs = GraphedNetwork(network) if uses_graphs else None
        if is_compiled:
            configure_compiler()
            network.compile_blocks()
        # Whether the passes of an update should have few different sizes (`vla.pass_sizes`)
        self.few_sizes = uses_graphs and is_compiled

    @classmethod
    def load(cls, checkpoint: str, options: LoadOptions) -> Policy:
        """Load a checkpoint (folder or hub id) or a trained adapter's folder. Raises BadInput."""
        parts = load_parts(checkpoint, options)
        policy = cls(parts)
        # The adapter is loaded after this, because the default teacher is the policy without it.
        if parts.adapter is not None:
            policy.load_adapter(parts.adapter.folder)
        return policy

    # Decisions

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Observation],
        mode: Mode = "greedy",
        temperature: float = 1.0,
        generators: Sequence[torch.Generator] | None = None,
        kept: KeptStates | None = None,
    ) -> Acted:
        """Decide one chunk per observation. kept: see `chunk_logits`.

        greedy: the likeliest tokens; median, sample: see `vla.tokens`; the actions are those of the tokens. l1: the
        actions of the regression head, not rounded; the tokens are the nearest ones. Only a policy with that head can
        do it (see `can_act_by_l1`). Raises BadInput for non-finite logits or actions.
        """
        self.network.adapters.refresh()
        states = self._trunk_states(observations, kept)
        logits, hidden = self._outputs(observations, states)
        if mode == "l1":
            assert self.l1_head is not None, "ask can_act_by_l1 first"
            chunk = self.l1_head(hidden).float().cpu().numpy()
            tokens = torch.from_numpy(encode(chunk)).flatten(1)
        elif mode == "greedy":
            tokens = logits.argmax(-1) + FIRST_ACTION_TOKEN
        elif mode == "median":
            tokens = median_tokens(logits)
        else:
            tokens = sample_tokens(logits, temperature, generators)
        logprobs = token_logprobs(logits, tokens, temperature).cpu()
        is_finite = torch.isfinite(logprobs).all() and (mode != "l1" or np.isfinite(chunk).all())
        if not is_finite:
            raise BadInput(
                "the policy's outputs are not finite: training has diverged, or weights are damaged; --resume would "
                "repeat it: start a new run from an earlier checkpoint, with a lower --lr and --desired-kl"
            )
        tokens = tokens.cpu()
        if mode != "l1":
            chunk = decode(tokens.numpy()).reshape(-1, self.chunk_length, self.action_dim)
        if kept is None and states is not None:
            kept = store(split_rows(*states), self.kept_on)
        return Acted(tokens, logprobs, self.env_actions(chunk), kept or [None] * len(tokens))

    def chunk_logits(self, observations: Sequence[Observation], kept: KeptStates | None = None) -> Tensor:
        """Logits of the action tokens, (B, A, 256) float32, with gradient. Column v belongs to id 31744 + v.

        kept: what a frozen trunk has computed for these observations when the policy acted (`Acted.kept`).
        """
        return self.chunk_outputs(observations, kept)[0]

    def chunk_outputs(
        self, observations: Sequence[Observation], kept: KeptStates | None = None
    ) -> tuple[Tensor, Tensor]:
        """`chunk_logits`, and the last hidden states (B, A, D) from which they are computed; with gradient."""
        self.network.adapters.refresh()
        # A batch of 1 would be compiled by itself, which takes a minute. Updates rarely have one: it is computed twice.
        copies = 2 if len(observations) == 1 and self.network.is_compiled and torch.is_grad_enabled() else 1
        computed = list(observations) * copies
        states = self._trunk_states(computed, None if kept is None else list(kept) * copies)
        logits, hidden = self._outputs(computed, states)
        return logits[: len(observations)], hidden[: len(observations)]

    @torch.no_grad()
    def _trunk_states(
        self, observations: Sequence[Observation], kept: KeptStates | None
    ) -> TrunkStates | None:
        """What a frozen trunk computes, taken from `kept` if all rows are there; None if the trunk is trained, too."""
        if self.network.trained_blocks is None:
            return None
        # Most often none or all are kept. They are mixed where another process has kept none (`rl.rollout`).
        rows = [row for row in kept or () if row is not None]
        if len(rows) < len(observations):
            return self._run("trunk", *self.model_inputs(observations))
        return join_rows(rows, self.model_inputs.prompt_length(observations[0]), self.device)

    def _outputs(
        self, observations: Sequence[Observation], states: TrunkStates | None
    ) -> tuple[Tensor, Tensor]:
        """Logits and last hidden states: from a frozen trunk's states, or else from the observations themselves."""
        if states is None:
            return self._run("forward", *self.model_inputs(observations))
        return self._run("top", *states)

    def _run(self, part: Part, *arguments: Tensor | None) -> Any:
        """The results of the network's method of the name `part`; where CUDA graphs are used, of its recording."""
        if self._graphs is not None:
            return self._graphs.run(part, *arguments)
        return getattr(self.network, part)(*arguments)

    def env_actions(self, normalised: np.ndarray) -> np.ndarray:
        """Normalised actions (B, chunk_length, action_dim) in the env's units and conventions, float64."""
        actions = unnormalise(normalised, self.statistics.action)
        return to_env(actions) if self._has_libero_gripper else actions

    # Teacher

    def teacher(self) -> AbstractContextManager[None]:
        """Within this block the network decides as the teacher; see `vla.teacher`. Blocks may be nested.

        By default the teacher is the network without its adapters and with the pretrained proprio projector.
        """
        return self._teacher.acting()

    def act_as_teacher(
        self, observations: Sequence[Observation], mode: Mode = "greedy", kept: KeptStates | None = None
    ) -> Acted:
        """The teacher's decisions. kept: see `chunk_logits`; the frozen trunk is the teacher's, too."""
        with self.teacher():
            return self.act(observations, mode, kept=kept)

    def equals_teacher(self) -> bool:
        """Whether this policy has not been trained away from its teacher, so that both decide the same greedily."""
        return self._teacher.equals_student()

    def freeze_as_teacher(self) -> None:
        """Make this policy, as it is now, the teacher."""
        self._teacher = Snapshot([parameter for _, parameter in self._trainable])

    # Training

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All that is trained, always in the same order."""
        return list(self._trainable)

    def make_optimizer(self, lr: float, weight_decay: float) -> torch.optim.AdamW:
        """AdamW over all that is trained, see `vla.optimizer`."""
        return make_optimizer([parameter for _, parameter in self._trainable], lr, weight_decay)

    # Files

    def save_adapter(self, folder: str | Path, looks: str = "") -> None:
        """Write an adapter folder with all that training has changed.

        looks: the simulators' in this training, which say what the policy is shown by default. Without any it keeps
        those that the policy was loaded with.
        """
        metadata = {
            "base_fingerprint": self.base_fingerprint,
            "head_fingerprint": self.head_fingerprint,
            "frozen_weights": self.frozen_weights,
            "looks": looks or " ".join(self.info.looks),
            "l1_student": "laplace" if self.is_laplace else "tokens",
            "num_images": str(self.num_images),
            "scale": scale_digest(self.statistics),
            "unnorm_key": "" if len(self.info.statistics) == 1 else self.fixed_unnorm_key or "",
        }
        write_adapter(Path(folder), self.network, self.base_model, metadata)
        statistics = self.info.statistics_folder / STATISTICS_FILE
        if statistics.is_file():  # some bases have them in config.json
            shutil.copyfile(statistics, Path(folder) / STATISTICS_FILE)

    def load_adapter(self, folder: str | Path) -> None:
        """Load an adapter folder into this policy. Raises BadInput if it does not fit or belongs to another base.

        Warns if the frozen weights are int8 here or were in its training, but not both.
        """
        adapter = read_adapter(Path(folder))
        if adapter.base_fingerprint not in (None, self.base_fingerprint):
            raise BadInput(
                f"{adapter.folder} was trained on other weights ({adapter.base_model}) than {self.base_model}: "
                "give its own base"
            )
        if adapter.head_fingerprint not in (None, self.head_fingerprint):
            raise BadInput(
                f"{adapter.folder} was trained beside another L1 head (action_head--*.pt) than {self.base_model} "
                "has, or beside none: give its base as it was then"
            )
        formats = {adapter.frozen_weights, self.frozen_weights}
        if len(formats) == 2 and "int8" in formats:
            log.warning(
                "%s was trained on weights in %s: with %s its actions differ",
                adapter.folder,
                adapter.frozen_weights or "an unknown format",
                self.frozen_weights,
            )
        copy_into_network(adapter, self.network)
