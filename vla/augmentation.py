"""Random crops and colours of training images, in batches on the images' device.

Evaluation cuts the middle 90 % of the area out of an image (`vla.resampling.centre_crop`); training cuts the same area
out at a random place, and then changes brightness, contrast, saturation and hue, in this order, limiting the values to
[0, 1] after each. Every image draws for itself.

Source: openvla-oft @213c5ff, prismatic/vla/datasets/datasets.py, for the ranges; kvablack/dlimp @a36e167,
dlimp/augmentations.py, for the order and the conversions. There, all draws of an image come from one seed, so that
crops move along the diagonal only and the colours change together; here they are independent.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vla.resampling import CROP_AREA

CROP_SIDE = CROP_AREA**0.5  # of the image's side
MAX_BRIGHTNESS = 0.2  # added to values in [0, 1]
CONTRAST = (0.8, 1.2)
SATURATION = (0.8, 1.2)
MAX_HUE = 0.05  # of the full circle


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """uint8 (N, 3, S, S) -> uint8 of the same shape. `generator` is one of the images' device."""
    draws = torch.rand(len(images), 6, device=images.device, generator=generator)
    offsets, brightness, contrast, saturation, hue = draws.split([2, 1, 1, 1, 1], dim=1)
    values = crop(images.float() / 255, (1 - CROP_SIDE) * offsets).clamp(0, 1)
    values = (values + _per_image(brightness, -MAX_BRIGHTNESS, MAX_BRIGHTNESS)).clamp(0, 1)
    values = adjust_contrast(values, _per_image(contrast, *CONTRAST)).clamp(0, 1)
    values = adjust_colours(values, _per_image(saturation, *SATURATION), _per_image(hue, -MAX_HUE, MAX_HUE))
    return to_levels(values)


def _per_image(draws: Tensor, low: float, high: float) -> Tensor:
    """Uniform draws (N, 1) in [0, 1) -> factors (N, 1, 1, 1) in [low, high)."""
    return (low + (high - low) * draws)[..., None, None]


def crop(values: Tensor, offsets: Tensor) -> Tensor:
    """A square of 90 % of the area, enlarged to the old size bilinearly; corners of the box map to corners.

    values: float32 (N, 3, S, S). offsets: (N, 2), top and left edge of the box as shares of the side, from 0 to
    1 - CROP_SIDE.
    """
    # grid_sample counts from -1 to 1 and wants (x, y): output u in [-1, 1] lies at CROP_SIDE * u + shift.
    shift = (2 * offsets + CROP_SIDE - 1).flip(1)  # (N, 2)
    scale = CROP_SIDE * torch.eye(2, device=values.device).expand(len(values), 2, 2)
    grid = F.affine_grid(torch.cat([scale, shift[..., None]], dim=-1), list(values.shape), align_corners=True)
    return F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=True)


def adjust_contrast(values: Tensor, factors: Tensor) -> Tensor:
    """Scale the distance of every value from its colour plane's mean. values (N, 3, S, S); factors (N, 1, 1, 1)."""
    mean = values.mean(dim=(2, 3), keepdim=True)
    return mean + factors * (values - mean)


def adjust_colours(values: Tensor, saturation: Tensor, hue: Tensor) -> Tensor:
    """Multiply the saturation of HSV (up to 1) and turn the hue, keeping HSV's value.

    values: float32 (N, 3, S, S) in [0, 1]; saturation: factors (N, 1, 1, 1); hue: (N, 1, 1, 1), of the full circle.
    """
    value, chroma, sextant = _value_chroma_hue(values)
    chroma = torch.minimum(saturation * chroma, value)  # chroma = saturation * value
    sextant = sextant + 6 * hue
    # Each channel is a trapezoid over the hue: 0 for one third of the circle, `chroma` below `value` for another.
    planes = []
    for start in (5.0, 3.0, 1.0):
        position = torch.remainder(sextant + start, 6)
        planes.append(value - chroma * torch.minimum(position, 4 - position).clamp(0, 1))
    return torch.cat(planes, dim=1)


def _value_chroma_hue(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest channel, largest minus smallest, and hue in sixths of the circle (greys: 0), each (N, 1, S, S)."""
    red, green, blue = values.split(1, dim=1)
    value = values.amax(1, keepdim=True)
    chroma = value - values.amin(1, keepdim=True)
    divisor = torch.where(chroma > 0, chroma, 1.0)
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    return value, chroma, hue


def to_levels(values: Tensor) -> Tensor:
    """[0, 1] -> uint8 by floor(255.5 x), which is TensorFlow's conversion and that of `centre_crop`."""
    return (values.clamp(0, 1) * 255.5).to(torch.uint8)
