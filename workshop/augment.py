"""Crop training images and change their colours at random, as OpenVLA-OFT does.

Source: openvla-oft @213c5ff, prismatic/vla/datasets/datasets.py, for the ranges; kvablack/dlimp @a36e167,
dlimp/augmentations.py, for the order and the conversions. There all draws of an image come from one seed, so crops
move along the diagonal only, and the colours change together. Here the draws are independent.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from contracts import Observation
from vla.images import CROP_AREA

CROP_SIDE = CROP_AREA**0.5  # share of the image's side that a crop keeps
# Ranges of an image's six draws: the crop's offset down and right (as shares of the largest possible offset),
# brightness, contrast, saturation, hue.
LOWEST = [0, 0, -0.2, 0.8, 0.8, -0.05]
HIGHEST = [1, 1, 0.2, 1.2, 1.2, 0.05]


def augment_observations(
    observations: Sequence[Observation],
    noise_scale: np.ndarray,
    augment_images: bool,
    generator: torch.Generator,
) -> list[Observation]:
    """The observations with noise on their robot states and, if `augment_images`, random crops and colours."""
    device = generator.device
    images = np.stack([observation.images for observation in observations])
    if augment_images:
        planes = torch.from_numpy(images).to(device).movedim(-1, 2)  # (B, n, 3, S, S)
        augmented = augment(planes.flatten(0, 1), generator).view(planes.shape)
        images = augmented.movedim(2, -1).cpu().numpy()
    noise = torch.randn(len(observations), len(noise_scale), device=device, generator=generator)
    states = np.stack([observation.proprio for observation in observations])
    states = states + noise_scale * noise.cpu().numpy()
    return [
        replace(observation, images=pictures, proprio=state)
        for observation, pictures, state in zip(observations, images, states, strict=True)
    ]


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Crop, then change brightness, contrast, saturation and hue, limiting values to [0, 1] after each.

    uint8 (N, 3, S, S) -> uint8 of the same shape; every image has its own draws. `generator` is on the images' device.
    """
    draws = torch.rand(len(images), 6, device=images.device, generator=generator)
    lowest, highest = torch.tensor([LOWEST, HIGHEST], device=images.device)
    offsets, *colours = (lowest + (highest - lowest) * draws).split([2, 1, 1, 1, 1], dim=1)
    brightness, contrast, saturation, hue = (factors[..., None, None] for factors in colours)  # (N, 1, 1, 1)
    values = crop(images.float() / 255, (1 - CROP_SIDE) * offsets).clamp(0, 1)
    values = (values + brightness).clamp(0, 1)
    mean = values.mean(dim=(2, 3), keepdim=True)
    values = (mean + contrast * (values - mean)).clamp(0, 1)
    return to_levels(adjust_colours(values, saturation, hue))


def crop(values: Tensor, offsets: Tensor) -> Tensor:
    """Cut out a square of 90 % of the area and enlarge it bilinearly to the old size; corners map to corners.

    values: float32 (N, 3, S, S). offsets: (N, 2), the square's top and left edge as shares of the image's side, from 0
    to 1 - CROP_SIDE.
    """
    # grid_sample counts from -1 to 1 and expects (x, y): output u in [-1, 1] lies at CROP_SIDE * u + shift.
    shift = (2 * offsets + CROP_SIDE - 1).flip(1)  # (N, 2)
    scale = CROP_SIDE * torch.eye(2, device=values.device).expand(len(values), 2, 2)
    grid = F.affine_grid(torch.cat([scale, shift[..., None]], dim=-1), list(values.shape), align_corners=True)
    return F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=True)


def adjust_colours(values: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Multiply the saturation of HSV (limited to 1) and turn the hue; HSV's value stays.

    values: float32 (N, 3, S, S) in [0, 1]; saturation: factors (N, 1, 1, 1); hue: (N, 1, 1, 1), in full circles.
    """
    red, green, blue = values.split(1, dim=1)
    value = values.amax(1, keepdim=True)
    chroma = value - values.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    # The hue in sixths of the circle.
    sextant = torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sextant = torch.where(value == red, (green - blue) / divisor, sextant)
    chroma = torch.minimum(saturation * chroma, value)  # chroma = saturation * value
    # Each channel is a trapezoid over the hue: `value` for one third of the circle, `value - chroma` for another.
    channels = []
    for start in (5.0, 3.0, 1.0):
        position = torch.remainder(sextant + 6 * hue + start, 6)
        channels.append(value - chroma * torch.minimum(position, 4 - position).clamp(0, 1))
    return torch.cat(channels, dim=1)


def to_levels(values: Tensor) -> Tensor:
    """Convert [0, 1] to uint8 by floor(255.5 x), as TensorFlow and `centre_crop` do."""
    return (values.clamp(0, 1) * 255.5).to(torch.uint8)
