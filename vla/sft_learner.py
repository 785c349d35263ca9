"""One network, its data and its optimizer: everything of a training step stays on the device.

Nothing here waits for the device but `take_metrics` and `diagnosis`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from errors import BadInput
from vla.augmentation import augment
from vla.model import OpenVLAOFT
from vla.settings import LearnerSettings
from vla.sft_data import Frames, PixelScale, SftData
from vla.sft_loss import Diagnosis, action_loss, batch_metrics, diagnose, target_distributions, zero_other_rows

METRICS = ("loss", "objects_loss", "accuracy", "xyz_bin_error", "grad_norm")
ADAM_BETAS = (0.9, 0.98)
FINAL_LR = 0.01  # of the largest learning rate, where the cosine ends


class ObjectHead(nn.Module):
    """Regresses where the objects are from the last layer's input at the proprio token. Never saved.

    The proprio token decides no action itself: what it learns to say of the scene is there for the tokens that do.
    """

    def __init__(self, network: OpenVLAOFT, num_images: int, num_values: int):
        super().__init__()
        self.position = 1 + num_images * network.vision_backbone.num_patches  # BOS, then the image tokens
        self.linear = nn.Linear(network.language_model.config.hidden_size, num_values)
        nn.init.zeros_(self.linear.weight)  # and the bias: no draw from the global generator decides anything
        nn.init.zeros_(self.linear.bias)
        self._hidden: Tensor | None = None
        # Its input: the last layer's output is computed at the action positions only.
        network.language_model.model.layers[-1].input_layernorm.register_forward_pre_hook(self._keep)

    def _keep(self, _norm: nn.Module, inputs: tuple[Tensor]) -> None:
        self._hidden = inputs[0][:, self.position]

    def loss(self, objects: Tensor) -> Tensor:
        """Of the network's latest forward pass; objects (B, 6)."""
        assert self._hidden is not None, "the network has not run yet"
        return F.smooth_l1_loss(self.linear(self._hidden.float()), objects)


class Learner:
    """All parameters of `network` are trained; it stays in eval mode, which differs from training in no layer."""

    def __init__(self, network: OpenVLAOFT, data: SftData, scale: PixelScale, settings: LearnerSettings):
        self.network = network.requires_grad_(True)
        self.data = data
        self.settings = settings
        self._scale = scale
        self._device = data.train.targets.device
        zero_other_rows(network.language_model.lm_head)
        self._distributions = target_distributions(settings.soft_target_bins, self._device)
        self._objects = None
        if settings.aux_weight > 0:
            if network.proprio_projector is None:
                raise BadInput("--aux-weight reads the proprio token, which this checkpoint has not: leave it out")
            num_images, num_values = data.train.images.shape[1], data.train.objects.shape[1]
            self._objects = ObjectHead(network, num_images, num_values).to(self._device)
        self._parameters = [p for module in (network, self._objects) if module is not None for p in module.parameters()]
        self._optimizer = make_optimizer(self._parameters, settings)
        self._proprio_noise = settings.proprio_noise * data.train.proprio.std(0)  # (8,)
        self._generator = torch.Generator(self._device).manual_seed(settings.seed)
        self._metrics: list[Tensor] = []

    def step(self, step: int) -> None:
        """One optimizer step; `step` counts from 0."""
        settings, frames = self.settings, self.data.train
        index = torch.randint(len(frames), (settings.batch_size,), device=self._device, generator=self._generator)
        batch = self._disturbed(frames.rows(index))
        logits = self._logits(batch)
        loss = action_loss(logits, batch.targets, self._distributions, self.network.language_model.config.vocab_size)
        objects_loss = loss.new_zeros(()) if self._objects is None else self._objects.loss(batch.objects)
        (loss + settings.aux_weight * objects_loss).backward()
        grad_norm = nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        losses = torch.stack([loss, objects_loss]).detach()
        self._metrics.append(torch.cat([losses, batch_metrics(logits, batch.targets), grad_norm[None]]))

    def take_metrics(self) -> dict[str, float]:
        """Means over the steps since the last call."""
        means = torch.stack(self._metrics).mean(0).tolist()
        self._metrics.clear()
        return dict(zip(METRICS, means, strict=True))

    def diagnosis(self, network: OpenVLAOFT | None = None) -> Diagnosis | None:
        """Of `network`, or the one in training, on the held-out frames; None where there are none."""
        if self.data.held_out is None:
            return None
        with torch.no_grad():
            return diagnose(self._batches(self.data.held_out, network or self.network))

    def _batches(self, frames: Frames, network: OpenVLAOFT) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(frames), self.settings.batch_size):
            batch = frames.rows(slice(start, start + self.settings.batch_size))
            yield self._logits(batch, network), batch.targets

    def _disturbed(self, batch: Frames) -> Frames:
        """Training's version of the frames: images augmented, noise on the proprio."""
        images = batch.images.flatten(0, 1)  # (B * n, 3, S, S)
        if self.settings.augment:
            images = augment(images, self._generator)
        noise = torch.randn(batch.proprio.shape, device=self._device, generator=self._generator)
        proprio = (batch.proprio + self._proprio_noise * noise).clamp(-1, 1)  # as normalised
        return Frames(images.view_as(batch.images), proprio, batch.prompt, batch.targets, batch.objects)

    def _logits(self, batch: Frames, network: OpenVLAOFT | None = None) -> Tensor:
        """(B, A, 256) float32"""
        ids, lengths = self.data.prompts.rows(batch.prompt)
        on_cuda = self._device.type == "cuda"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=on_cuda):
            logits, _ = (network or self.network)(self._scale(batch.images), ids, lengths, batch.proprio)
        return logits


def make_optimizer(parameters: list[nn.Parameter], settings: LearnerSettings) -> torch.optim.AdamW:
    """AdamW that decays matrices only. Rows of words that no text has stay zero: they get no gradient."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=ADAM_BETAS, fused=True)


def learning_rate(step: int, settings: LearnerSettings) -> float:
    """Of step 0, 1, ...: linear warm-up, then half a cosine down to one hundredth."""
    warmup = min(1.0, (step + 1) / (settings.warmup_steps + 1))
    progress = max(0.0, step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * warmup * (FINAL_LR + (1 - FINAL_LR) * cosine)
