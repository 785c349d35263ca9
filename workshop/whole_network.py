"""Train all parameters of a small network, not only adapters."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from contracts import Observation, read_json, write_json
from vla.adapter_folder import copy_small_files
from vla.checkpoint import CheckpointInfo
from vla.dataset_statistics import STATISTICS_FILE
from vla.network_io import load_action_head, load_network, save_network
from vla.optimizer import make_optimizer
from vla.preprocessing import ImageProcessor, Inputs
from vla.prompts import load_tokenizer
from vla.tokens import ACTION_TOKEN_IDS, NUM_BINS
from workshop.demo_files import CHUNK_LENGTH


class WholeNetwork:
    """A network whose parameters are all trained, in float32. It has the members of `Policy` that training uses.

    The rows of `lm_head` that belong to no action token are set to zero and never computed. So the logits of these ids
    are 0, and their part of the softmax is known without computing them. The network stays in eval mode; no layer
    behaves differently in training mode.

    With `trains_l1_head` the checkpoint's L1 head is trained, too, and `lm_head` is neither trained nor changed.
    """

    few_sizes = False  # of passes, as `Policy.few_sizes`: nothing is recorded here

    def __init__(
        self, info: CheckpointInfo, unnorm_key: str, device: torch.device, trains_l1_head: bool = False
    ):
        self.info = info
        self.device = device
        statistics = info.statistics[unnorm_key]
        self.model_inputs = Inputs(
            processor=ImageProcessor.load(info.weights_folder),
            tokenizer=load_tokenizer(info.weights_folder),
            num_images=info.num_images,
            proprio=statistics.proprio if info.uses_proprio else None,
            device=device,
        )
        self.network = load_network(info, CHUNK_LENGTH * statistics.action.dim, device, torch.float32)
        self.action_head = load_action_head(info, device, torch.float32) if trains_l1_head else None
        rows = self.network.language_model.lm_head.weight
        # The log-sum-exp of the logits of all other ids, which are 0 once their rows are.
        self.other_logsumexp = math.log(len(rows) - NUM_BINS)
        self.network.requires_grad_(True)
        if self.action_head is not None:
            self.action_head.requires_grad_(True)
            rows.requires_grad_(False)
        else:
            with torch.no_grad():
                rows[: ACTION_TOKEN_IDS.start] = 0.0
                rows[ACTION_TOKEN_IDS.stop :] = 0.0

    def chunk_logits(self, observations: Sequence[Observation]) -> Tensor:
        """Logits of the action tokens, (B, A, 256) float32, with gradient to all parameters."""
        return self.chunk_outputs(observations)[0]

    def chunk_outputs(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """`chunk_logits`, and the last hidden states (B, A, D) that they come from; with gradient."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.network(*self.model_inputs(observations))

    def logits_and_other_logsumexp(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """Logits of the action tokens, (B, A, 256), and the log-sum-exp of all other ids' logits, (B, A)."""
        logits = self.chunk_logits(observations)
        return logits, logits.new_full(logits.shape[:2], self.other_logsumexp)

    def named_trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named_parameters = [(name, p) for name, p in self.network.named_parameters() if p.requires_grad]
        if self.action_head is not None:
            named_parameters += self.action_head.named_parameters(prefix="action_head")
        return named_parameters

    def make_optimizer(self, lr: float, weight_decay: float) -> torch.optim.AdamW:
        """AdamW over all that is trained, see `vla.optimizer`."""
        return make_optimizer([p for _, p in self.named_trainable_parameters()], lr, weight_decay)

    def save(self, folder: Path, looks: Sequence[str], dtype: torch.dtype) -> None:
        """Write a whole checkpoint folder: weights in `dtype`, the demonstrations' statistics, and `looks`.

        The tokenizer's and the processor's files are copied from the checkpoint that training started from. An L1 head
        that was not trained is left out, because it reads hidden states that training has changed. Where config.json
        does not state the number of images, the presence of that head decides it; so config.json states it.
        """
        statistics = read_json(self.info.statistics_folder / STATISTICS_FILE)
        dtype_name = str(dtype).removeprefix("torch.")
        config = read_json(self.info.weights_folder / "config.json")
        config["num_images_in_input"] = self.info.num_images
        config["norm_stats"] = statistics
        config["torch_dtype"] = dtype_name
        config["looks"] = looks
        config["text_config"] = config.get("text_config", {}) | {"torch_dtype": dtype_name}
        save_network(folder, self.network, config, dtype=dtype, action_head=self.action_head)
        copy_small_files(self.info.weights_folder, folder)
        write_json(folder / STATISTICS_FILE, statistics)
