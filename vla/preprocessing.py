"""From observations to the arguments of the network: pixel values, prompt ids, proprio. One path for all programs.

    frames uint8 (..., n, 256, 256, 3)
      -- model_input_images --> uint8 (..., n, S, S, 3)    what the training data went through
      -- pixel_values -->       float32 (..., 6n, S, S)    what the checkpoint's image processor does

Source: openvla-oft @213c5ff, experiments/robot/openvla_utils.py and prismatic/extern/hf/processing_prismatic.py.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from contracts import BadInput, Observation, read_json
from vla.tokens import BOS_ID, EMPTY_TOKEN_ID, EOS_ID, PAD_ID, VectorStatistics, normalise_proprio

CROP_AREA = 0.9
SINE = (-0.16666654943701084, 0.008332178146138854, -0.00019517298981385725)  # of x^3, x^5, x^7: for `_sine`
COSINE = (
    -0.49999999725108224,
    0.041666623324344516,
    -0.001388676379437604,
    2.4390450703564542e-05,
)  # of x^2 to x^8
PROMPT_MULTIPLE = 16  # of padded prompts


@dataclass(frozen=True)
class ImageProcessor:
    """What preprocessor_config.json says. Tuples have one entry per backbone: DINOv2, SigLIP."""

    image_size: int  # S: 224 in real checkpoints
    means: tuple[tuple[float, ...], ...]  # (2, 3): backbone, RGB; of pixels in [0, 1]
    stds: tuple[tuple[float, ...], ...]  # (2, 3)

    @classmethod
    def load(cls, folder: str | Path) -> "ImageProcessor":
        path = Path(folder) / "preprocessor_config.json"
        config = read_json(path)
        try:
            if config.get("image_resize_strategy", "resize-naive") != "resize-naive" or config.get(
                "tvf_do_letterbox"
            ):
                raise ValueError("images are resized by another strategy than 'resize-naive'")
            size = config["input_sizes"][0][1]
            # Released checkpoints carry means and stds twice: as published, and rounded to bfloat16 in
            # `tvf_normalize_params`, which are those that the original processor applies.
            rounded = config.get("tvf_normalize_params")
            means = [entry["mean"] for entry in rounded] if rounded else config["means"]
            stds = [entry["std"] for entry in rounded] if rounded else config["stds"]
            if config["input_sizes"] != [[3, size, size]] * 2 or np.shape([means, stds]) != (2, 2, 3):
                raise ValueError(
                    "expected one square input size, mean and std of RGB, for each of two backbones"
                )
            return cls(size, tuple(map(tuple, means)), tuple(map(tuple, stds)))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path}: not the image processor of an OpenVLA-OFT checkpoint ({error!r})"
            ) from error


@dataclass
class Inputs:
    """What one checkpoint's network reads of observations, on the network's device."""

    processor: ImageProcessor
    tokenizer: Tokenizer
    num_images: int
    proprio: VectorStatistics | None  # None: the network does not read it
    device: torch.device

    def __post_init__(self) -> None:
        # Frames (..., H, W, 3) -> (..., S, S, 3), uint8: may be done elsewhere, see Observation.prepared.
        self.prepare = partial(model_input_images, image_size=self.processor.image_size)
        self._levels = torch.from_numpy(normalised_levels(self.processor)).to(self.device)
        self._prompt_ids = lru_cache(partial(prompt_ids, self.tokenizer))

    def __call__(
        self, observations: Sequence[Observation]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The arguments of the network: pixel values, prompt ids, their lengths, proprio."""
        images = np.stack([self.view(observation) for observation in observations])
        if self.device.type == "cpu":
            pixels = torch.from_numpy(pixel_values(images, self.processor))
        else:
            pixels = pixel_values_on_device(send(torch.from_numpy(images), self.device), self._levels)
        ids, lengths = pad_prompts([torch.tensor(self._prompt_ids(o.instruction)) for o in observations])
        lengths = None if lengths is None else send(lengths, self.device)
        proprio = None
        if self.proprio is not None:
            raw = np.stack([o.proprio for o in observations])
            if raw.shape[1] != self.proprio.dim:
                raise BadInput(
                    f"the policy reads a robot state of {self.proprio.dim} numbers, the simulator has {raw.shape[1]}: "
                    "use another --checkpoint"
                )
            states = normalise_proprio(raw, self.proprio)
            proprio = send(torch.from_numpy(states).float(), self.device)
        return pixels, send(ids, self.device), lengths, proprio

    def view(self, observation: Observation) -> np.ndarray:
        """The images as the network sees them, uint8 (num_images, S, S, 3)."""
        images = observation.images[: self.num_images]
        return images if observation.prepared else self.prepare(images)


def model_input_images(frames: np.ndarray, image_size: int) -> np.ndarray:
    """uint8 (..., H, W, 3) RGB -> uint8 (..., S, S, 3): JPEG round trip, Lanczos resize to S, centre crop."""
    images = np.empty((*frames.shape[:-3], image_size, image_size, 3), dtype=np.uint8)
    for index in np.ndindex(frames.shape[:-3]):
        planes = np.ascontiguousarray(jpeg_round_trip(frames[index]).transpose(2, 0, 1))
        np.stack(list(centre_crop(lanczos_resize(planes, image_size))), axis=-1, out=images[index])
    return images


def jpeg_round_trip(image: np.ndarray) -> np.ndarray:
    """uint8 (H, W, 3) -> the same after JPEG, quality 95, chroma 4:2:0: the training data were stored so.

    By two libraries: TensorFlow encodes with the accurate DCT, as Pillow does, and decodes with the fast DCT and smooth
    chroma, which only simplejpeg offers.
    """
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    return simplejpeg.decode_jpeg(file.getbuffer(), colorspace="RGB", fastdct=True, fastupsample=False)


# TensorFlow's Lanczos resize and centre crop (core/kernels/image: scale_and_translate_op, crop_and_resize_op) of one
# image as colour planes (3, H, W), which keeps rows and columns contiguous. Its float32 arithmetic is followed in type
# and order, because the last bit of a value next to x.5 decides a grey level.


def lanczos_resize(planes: np.ndarray, size: int) -> np.ndarray:
    """uint8 (3, H, W) -> uint8 (3, size, size): antialiased Lanczos-3, vertically first, rounded half to even."""
    rows = _weighted_sums(
        np.ascontiguousarray(planes.transpose(1, 0, 2), dtype=np.float32), size
    )  # (size, 3, W)
    columns = _weighted_sums(
        np.ascontiguousarray(rows.transpose(2, 1, 0)), size
    )  # (size, 3, size): x, channel, y
    levels = np.clip(np.rint(columns), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def _weighted_sums(source: np.ndarray, size: int) -> np.ndarray:
    """(num_in, 3, L) -> (size, 3, L). One product after the other is added in float32: BLAS would round otherwise."""
    inputs, weights = _taps(len(source), size)
    sums = np.take(source, inputs[0], axis=0) * weights[0]
    product = np.empty_like(sums)
    for tap, weight in zip(inputs[1:], weights[1:], strict=True):
        np.take(source, tap, axis=0, out=product, mode="clip")  # the default mode writes to a buffer first
        product *= weight
        sums += product
    return sums


@lru_cache(maxsize=16)
def _taps(num_in: int, num_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Each output's T inputs in order (T, num_out), and their weights (T, num_out, 1, 1). Surplus taps weigh 0."""
    matrix = lanczos_weights(num_in, num_out)
    first = (matrix != 0).argmax(axis=1)
    last = num_in - 1 - (matrix != 0)[:, ::-1].argmax(axis=1)
    inputs = first + np.arange((last - first).max() + 1)[:, None]
    clipped = np.minimum(inputs, num_in - 1)
    weights = np.where(inputs < num_in, np.take_along_axis(matrix.T, clipped, axis=0), np.float32(0))
    return clipped, weights[..., None, None]


def lanczos_weights(num_in: int, num_out: int) -> np.ndarray:
    """Weights (num_out, num_in) float32, each row the kernel at one output's place: TensorFlow's for antialias=True.

    Stretched by the reduction factor (never shrunk), sampled at pixel centres, cut off at the border, renormalised.
    """
    one, half, radius = np.float32(1), np.float32(0.5), np.float32(3)
    inverse_scale = one / np.float32(num_out / num_in)
    stretch = max(inverse_scale, one)
    weights = np.zeros((num_out, num_in), dtype=np.float32)
    for i in range(num_out):
        centre = (np.float32(i) + half) * inverse_scale
        start = max(int(np.ceil(centre - radius * stretch - half)), 0)
        stop = min(int(np.floor(centre + radius * stretch - half)), num_in - 1) + 1
        x = np.abs((np.arange(start, stop, dtype=np.float32) + half - centre) * (one / stretch))
        pi, safe = np.float32(np.pi), np.maximum(x, np.float32(1e-3))  # below, TensorFlow takes 1
        kernel = (
            radius * _sine(pi * safe) * _sine(pi * safe / radius) / (pi * pi * safe * safe)
        )  # sinc(x) sinc(x / 3)
        kernel = np.where(x > radius, np.float32(0), np.where(x <= np.float32(1e-3), one, kernel))
        total = np.add.accumulate(kernel)[-1]  # one after the other in float32, not NumPy's pairwise sum
        weights[i, start:stop] = kernel * (one / total)
    return weights


def _sine(x: np.ndarray) -> np.ndarray:
    """float32 (at most 120) as by sinf of glibc 2.28 and newer, which TensorFlow calls: not always the nearest float32.

    Source of the polynomials, in float64: glibc, sysdeps/ieee754/flt-32/s_sincosf.h.
    """
    quarters = np.rint(x.astype(np.float64) * (2 / np.pi))
    r = x - quarters * (np.pi / 2)
    square = r * r
    sine = r + r * square * SINE[0] + r * square * square * (SINE[1] + square * SINE[2])
    fourth = square * square
    cosine = 1 + square * COSINE[0] + fourth * COSINE[1] + fourth * square * (COSINE[2] + square * COSINE[3])
    turned = np.where(quarters % 2 == 1, cosine, sine)
    return np.where(quarters % 4 >= 2, -turned, turned).astype(np.float32)


def centre_crop(planes: np.ndarray) -> np.ndarray:
    """uint8 (3, S, S) -> uint8 (3, S, S): the middle 90 % of the area, enlarged bilinearly, horizontally first."""
    low, high, fraction = _crop_taps(planes.shape[-1])
    unit = np.float32(1 / 255)
    left, right = (np.take(planes, taps, axis=2).astype(np.float32) * unit for taps in (low, high))
    rows = _interpolate(left, right, fraction)
    cropped = _interpolate(np.take(rows, low, axis=1), np.take(rows, high, axis=1), fraction[:, None])
    return (np.clip(cropped, 0, 1, out=cropped) * np.float32(255.5)).astype(
        np.uint8
    )  # which is not rounding 255 x


def _interpolate(first: np.ndarray, second: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """first + (second - first) * fraction, in the memory of `second`."""
    second -= first
    second *= fraction
    second += first
    return second


@lru_cache(maxsize=16)
def _crop_taps(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each output pixel the two source pixels and the weight of the second; corners of the box map to corners."""
    side, last = np.sqrt(np.float32(CROP_AREA)), np.float32(size - 1)
    start = (np.float32(1) - side) / np.float32(2)
    step = (start + side - start) * last / last  # rounded in TensorFlow's order
    positions = start * last + np.arange(size, dtype=np.float32) * step
    low = np.floor(positions)
    return low.astype(np.intp), np.ceil(positions).astype(np.intp), positions - low


def pixel_values(images: np.ndarray, processor: ImageProcessor) -> np.ndarray:
    """uint8 (..., n, S, S, 3) -> float32 (..., 6n, S, S): per image DINOv2's 3 channels, then SigLIP's 3."""
    *batch, num_images, size, _, _ = images.shape
    pixels = np.empty((*batch, num_images, 2, 3, size, size), dtype=np.float32)
    levels = normalised_levels(processor)
    for place in np.ndindex(*batch, num_images, 2, 3):
        backbone, channel = place[-2:]
        # Not the default mode: that one writes to a buffer first. No level is beyond 255.
        np.take(levels[backbone, channel], images[place[:-2]][..., channel], out=pixels[place], mode="clip")
    return pixels.reshape(*batch, 6 * num_images, size, size)


def pixel_values_on_device(images: Tensor, levels: Tensor) -> Tensor:
    """The same for images (B, n, S, S, 3) and `normalised_levels` (2, 3, 256) that are on a GPU: (B, 6n, S, S)."""
    channels = torch.arange(6, device=images.device).view(2, 3, 1, 1)
    planes = images.permute(0, 1, 4, 2, 3).unsqueeze(2).int()  # (B, n, 1, 3, S, S)
    return levels.flatten()[planes + 256 * channels].flatten(1, 3)


@lru_cache(maxsize=4)
def normalised_levels(processor: ImageProcessor) -> np.ndarray:
    """(2, 3, 256) float32: what each of the 256 levels becomes; looking up is exact and beats computing."""
    levels = np.arange(256, dtype=np.float32) / np.float32(255)
    means, stds = (
        np.array(values, dtype=np.float32)[..., None] for values in (processor.means, processor.stds)
    )
    return (levels - means) / stds


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`, without waiting for a GPU as a plain `.to(device)` does until all its work is done."""
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty_like(tensor, pin_memory=True)
    np.copyto(
        pinned.numpy(), tensor.numpy()
    )  # in this thread: to wake all of torch's takes some 4 ms on 32 cores
    return pinned.to(device, non_blocking=True)


def synthetic_observations(
    num_images: int, proprio: VectorStatistics | None, count: int = 8
) -> list[Observation]:
    """Smooth random images, and states within the ranges of `proprio`."""
    random, observations = np.random.default_rng(0), []
    for _ in range(count):
        coarse = random.integers(0, 256, (num_images, 8, 8, 3), dtype=np.uint8)
        state = np.zeros(0) if proprio is None else random.uniform(proprio.q01, proprio.q99)
        instruction = "pick up the black bowl and place it on the plate"
        observations.append(Observation(coarse.repeat(32, axis=1).repeat(32, axis=2), state, instruction))
    return observations


def prompt(instruction: str) -> str:
    """The sentence on which OpenVLA was trained. No system prompt, nothing stripped."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def prompt_ids(tokenizer: Tokenizer, instruction: str) -> list[int]:
    """Token ids of the prompt, BOS first (whether the tokenizer would add it depends on its file) and 29871 last."""
    ids = [BOS_ID, *tokenizer.encode(prompt(instruction), add_special_tokens=False).ids]
    return ids if ids[-1] == EMPTY_TOKEN_ID else [*ids, EMPTY_TOKEN_ID]


def pad_prompts(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Prompts (P_i,) -> ids (B, P), padded on the right, and their lengths (B,); None where all are equal: no mask.

    Different ones are padded to a multiple of 16: what is recorded or compiled for one shape then serves most batches.
    """
    lengths = torch.tensor([len(ids) for ids in prompts])
    ids = pad_sequence(list(prompts), batch_first=True, padding_value=PAD_ID)
    if not (lengths != lengths[0]).any():
        return ids, None
    return F.pad(ids, (0, -ids.shape[1] % PROMPT_MULTIPLE), value=PAD_ID), lengths


def load_tokenizer(folder: str | Path) -> Tokenizer:
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise BadInput(
            f"{path} is missing: copy it from its source (AutoTokenizer makes it of a tokenizer.model)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise BadInput(
            f"{path}: is not a usable tokenizer file ({error}); download or copy it again"
        ) from error
    tokenizer.no_padding()  # both may be saved in the file, and would change the ids
    tokenizer.no_truncation()
    # The vocabulary of another model gives ids that this one reads as other words, and nothing else would tell.
    for token_id, token in ((BOS_ID, "<s>"), (EOS_ID, "</s>"), (EMPTY_TOKEN_ID, "▁")):
        if (found := tokenizer.id_to_token(token_id)) != token:
            raise BadInput(
                f"{path}: id {token_id} is {found!r}, not {token!r}; the Llama-2 tokenizer is needed"
            )
    return tokenizer
