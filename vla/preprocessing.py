"""Turn observations into the arguments of the network (pixel values, prompt ids, proprio), for all programs.

    frames uint8 (..., n, 256, 256, 3)
      -- model_input_images --> uint8 (..., n, S, S, 3)    the processing of the training data (vla/images.py)
      -- pixel_values -->       float32 (B, 6n, S, S)      the normalisation of the checkpoint's image processor

Source: openvla-oft @213c5ff, experiments/robot/openvla_utils.py and prismatic/extern/hf/processing_prismatic.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from contracts import BadInput, Observation, read_fields
from vla.dataset_statistics import VectorStatistics, normalise_proprio
from vla.images import model_input_images
from vla.prompts import pad_prompts, prompt_ids

MADE_UP_INSTRUCTION = "pick up the black bowl and place it on the plate"


@dataclass(frozen=True)
class _Normalisation:
    """Of the RGB channels of pixels in [0, 1]."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class ImageProcessor:
    """The settings in preprocessor_config.json that are read, and the only values that are supported.

    Tuples have one entry per backbone: DINOv2, SigLIP.
    """

    input_sizes: tuple[tuple[int, int, int], tuple[int, int, int]]
    # Checkpoints have means and stds twice: as published, and rounded to bfloat16 here. The original processor applies
    # the rounded ones.
    tvf_normalize_params: tuple[_Normalisation, _Normalisation]
    image_resize_strategy: Literal["resize-naive"] = "resize-naive"
    tvf_do_letterbox: Literal[False] | None = None

    @property
    def image_size(self) -> int:
        """S: 224 in real checkpoints."""
        return self.input_sizes[0][1]

    def normalisation(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, (2, 3, 1, 1) float32: backbone, RGB."""
        vectors = [(channels.mean, channels.std) for channels in self.tvf_normalize_params]
        mean, std = torch.tensor(vectors, device=device)[..., None, None].unbind(1)
        return mean, std

    @classmethod
    def load(cls, folder: Path) -> "ImageProcessor":
        """Read it from a checkpoint folder. Raises BadInput for settings that are not supported."""
        path = folder / "preprocessor_config.json"
        all_processors = folder / "processor_config.json"  # as transformers 5 writes it
        if all_processors.exists() and not path.exists():
            return read_fields(all_processors, cls, part="image_processor")
        return read_fields(path, cls, "get the file of an OpenVLA-OFT checkpoint")


@dataclass
class Inputs:
    """Turns observations into the arguments of one checkpoint's network, on its device."""

    processor: ImageProcessor
    tokenizer: Tokenizer
    num_images: int
    proprio: VectorStatistics | None  # None: the network does not read the robot's state
    device: torch.device

    def __post_init__(self) -> None:
        # Frames (..., H, W, 3) -> (..., S, S, 3), uint8. Simulators call this function in their own processes; their
        # observations are then marked as `prepared`.
        self.prepare_images = partial(model_input_images, image_size=self.processor.image_size)
        self._normalisation = self.processor.normalisation(self.device)
        self._prompt_ids = lru_cache(partial(prompt_ids, self.tokenizer))

    def __call__(
        self, observations: Sequence[Observation]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The arguments of OpenVLAOFT.forward: pixel values, prompt ids, prompt lengths, proprio."""
        images = np.stack([self.images_of(observation) for observation in observations])
        pixels = pixel_values(send(torch.from_numpy(images), self.device), *self._normalisation)
        prompts = [torch.tensor(self._prompt_ids(observation.instruction)) for observation in observations]
        ids, lengths = pad_prompts(prompts)
        if lengths is not None:
            lengths = send(lengths, self.device)
        return pixels, send(ids, self.device), lengths, self._proprio(observations)

    def prompt_length(self, observation: Observation) -> int:
        """How many token ids the prompt has."""
        return len(self._prompt_ids(observation.instruction))

    def images_of(self, observation: Observation) -> np.ndarray:
        """The images as the network sees them, uint8 (num_images, S, S, 3)."""
        images = observation.images[: self.num_images]
        if len(images) < self.num_images:
            raise BadInput(f"the policy reads {self.num_images} images, the simulator has {len(images)}")
        return images if observation.prepared else self.prepare_images(images)

    def _proprio(self, observations: Sequence[Observation]) -> Tensor | None:
        """Normalised robot states, (B, D) float32; None when the network does not read them."""
        if self.proprio is None:
            return None
        states = np.stack([observation.proprio for observation in observations])
        if states.shape[1] != self.proprio.dim:
            raise BadInput(f"the policy reads {self.proprio.dim} numbers of the robot, not {states.shape[1]}")
        normalised = normalise_proprio(states, self.proprio)
        return send(torch.from_numpy(normalised).float(), self.device)


def pixel_values(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Normalise images: uint8 (B, n, S, S, 3) -> float32 (B, 6n, S, S); per image 3 for DINOv2, 3 for SigLIP.

    mean, std: see `ImageProcessor.normalisation`.
    """
    planes = images.permute(0, 1, 4, 2, 3).contiguous().unsqueeze(2)  # (B, n, 1, 3, S, S)
    # A tensor, because a GPU would multiply by 1 / 255 for a plain number, which rounds differently.
    largest_level = mean.new_full((), 255.0)
    return ((planes / largest_level - mean) / std).flatten(1, 3)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device`. A plain `.to(device)` would wait until the GPU has finished its work."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty_like(tensor, pin_memory=True)
    # NumPy copies in this thread. Waking all of torch's threads takes some 4 ms on 32 cores.
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)


def synthetic_observations(
    num_images: int, proprio: VectorStatistics | None, count: int = 8, instruction: str = MADE_UP_INSTRUCTION
) -> list[Observation]:
    """Make observations without a simulator, always the same: coarse random images, states in `proprio`'s range."""
    rng = np.random.default_rng(0)
    observations = []
    for _ in range(count):
        coarse = rng.integers(0, 256, (num_images, 8, 8, 3), dtype=np.uint8)
        images = coarse.repeat(32, axis=1).repeat(32, axis=2)
        state = np.zeros(0) if proprio is None else rng.uniform(*proprio.bounds)
        observations.append(Observation(images, state, instruction))
    return observations
