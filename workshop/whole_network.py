"""Train all parameters of a small network, not only adapters."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from contracts import Observation, read_json, write_json
from vla.checkpoint import CheckpointInfo
from vla.dataset_statistics import STATISTICS_FILE
from vla.network_io import load_l1_head, load_network, save_network
from vla.optimizer import make_optimizer
from vla.preprocessing import ImageProcessor, Inputs
from vla.prompts import load_tokenizer
from vla.tokens import ACTION_TOKEN_IDS, NUM_BINS
from workshop.demo_files import CHUNK_LENGTH

BETAS = (0.9, 0.98)  # of AdamW


class WholeNetwork:
    """A network whose parameters are all trained, in float32. It has the members of `Policy` that training uses.

    The rows of `lm_head` that belong to no action token are set to zero and never computed. So the logits of these ids
    are 0, and their part of the softmax is known without computing them.

    With `trains_l1_head` the checkpoint's L1 head is trained, too, and `lm_head` is neither trained nor changed.
    """

    few_sizes = False  # of passes, as `Policy.few_sizes`: nothing is recorded here

    def __init__(
        self, info: CheckpointInfo, unnorm_key: str, device: torch.device, trains_l1_head: bool = False
    ):
        self.info = info
        self.device = device
        statistics = info.statistics[unnorm_key]
        proprio = statistics.proprio if info.uses_proprio else None
        processor = ImageProcessor.load(info.weights_folder)
        tokenizer = load_tokenizer(info.weights_folder)
        self.model_inputs = Inputs(processor, tokenizer, info.num_images, proprio, device)
        self.network = load_network(info, CHUNK_LENGTH * statistics.action.dim, device, torch.float32)
        self.l1_head = load_l1_head(info, device, torch.float32) if trains_l1_head else None
        self.network.requires_grad_(True)
        rows = self.network.language_model.lm_head.weight
        # The log-sum-exp of the logits of all other ids, which are 0 once their rows are.
        self.other_logsumexp = math.log(len(rows) - NUM_BINS)
        if self.l1_head is not None:
            self.l1_head.requires_grad_(True)
            rows.requires_grad_(False)
        else:
            with torch.no_grad():
                rows[: ACTION_TOKEN_IDS.start] = 0.0
                rows[ACTION_TOKEN_IDS.stop :] = 0.0

    def chunk_outputs(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        """Logits of the action tokens, (B, A, 256) float32, and the hidden states (B, A, D) that they come from."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.network(*self.model_inputs(observations))

    def make_optimizer(self, lr: float, weight_decay: float) -> torch.optim.AdamW:
        """AdamW over all that is trained."""
        modules = [module for module in (self.network, self.l1_head) if module is not None]
        parameters = [one for module in modules for one in module.parameters() if one.requires_grad]
        optimizer = make_optimizer(parameters, lr, weight_decay)
        optimizer.param_groups[0]["betas"] = BETAS
        return optimizer

    def save(self, folder: Path, looks: Sequence[str]) -> None:
        """Write a whole checkpoint folder in bfloat16, with the demonstrations' statistics and `looks`.

        An L1 head that was not trained is left out, because it reads hidden states that training has changed. Where
        config.json does not state the number of images, the presence of that head decides it; so config.json states it.
        """
        statistics = read_json(self.info.statistics_folder / STATISTICS_FILE)
        config = read_json(self.info.weights_folder / "config.json")
        config["num_images_in_input"] = self.info.num_images
        config["norm_stats"] = statistics
        config["looks"] = looks
        config["torch_dtype"] = "bfloat16"
        config["text_config"] = config.get("text_config", {}) | {"torch_dtype": "bfloat16"}
        source = self.info.weights_folder
        save_network(folder, self.network, config, l1_head=self.l1_head, source=source)
        write_json(folder / STATISTICS_FILE, statistics)
