"""From observations to the arguments of the network: pixels, prompt, proprioception."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from contracts import Observation
from transfer import send
from vla.preprocessing import (
    ImageProcessor,
    model_input_images,
    normalised_levels,
    pixel_values,
    pixel_values_on_device,
)
from vla.prompt import pad_prompts, prompt_ids
from vla.statistics import NormalisationType, VectorStatistics, normalise_proprio


class Inputs:
    """What one checkpoint's network reads of observations, on the network's device."""

    def __init__(
        self,
        processor: ImageProcessor,
        tokenizer: Tokenizer,
        num_images: int,
        proprio: VectorStatistics | None,
        normalisation: NormalisationType,
        device: torch.device,
    ):
        """proprio: its statistics, for a network that reads it."""
        # Frames (..., H, W, 3) -> (..., S, S, 3), uint8: may be done elsewhere, see Observation.prepared.
        self.prepare = partial(model_input_images, image_size=processor.image_size)
        self.num_images = num_images
        self.processor = processor
        self.tokenizer = tokenizer
        self._proprio_statistics = proprio
        self._normalisation = normalisation
        self._prompts: dict[str, Tensor] = {}
        self.to(device)

    def to(self, device: torch.device) -> None:
        """From now on, for a network on that device."""
        self._device = device
        self._levels = torch.from_numpy(normalised_levels(self.processor)).to(device)

    def __call__(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The arguments of `OpenVLAOFT.forward`."""
        images = np.stack([self.view(observation) for observation in observations])
        if self._device.type == "cpu":
            pixels = torch.from_numpy(pixel_values(images, self.processor))
        else:
            pixels = pixel_values_on_device(send(torch.from_numpy(images), self._device), self._levels)
        ids, lengths = pad_prompts([self.prompt(observation.instruction) for observation in observations])
        lengths = None if lengths is None else send(lengths, self._device)
        return pixels, send(ids, self._device), lengths, self._proprio(observations)

    def view(self, observation: Observation) -> np.ndarray:
        """The images as the network sees them, uint8 (num_images, S, S, 3)."""
        images = observation.images[: self.num_images]
        if len(images) < self.num_images:
            raise ValueError(f"an observation has {len(images)} images, the policy needs {self.num_images}")
        return images if observation.prepared else self.prepare(images)

    def prompt(self, instruction: str) -> Tensor:
        """Token ids (P,) int64."""
        if instruction not in self._prompts:
            self._prompts[instruction] = torch.tensor(prompt_ids(self.tokenizer, instruction))
        return self._prompts[instruction]

    def _proprio(self, observations: Sequence[Observation]) -> Tensor | None:
        if self._proprio_statistics is None:
            return None
        values = np.stack([observation.proprio for observation in observations])
        normalised = normalise_proprio(values, self._proprio_statistics, self._normalisation)
        return send(torch.from_numpy(normalised).float(), self._device)
