"""Make the network's input images from frames, bit for bit like the TensorFlow code that prepared the training data.

    frame uint8 (256, 256, 3) -> JPEG round trip -> Lanczos resize -> centre crop -> uint8 (S, S, 3)

Resize and crop work on colour planes (3, H, W), which keeps rows and columns contiguous. They compute in float32 and in
the same order as TensorFlow, because the last bit of a value near x.5 decides to which grey level it is rounded.

Source: openvla-oft @213c5ff, experiments/robot/openvla_utils.py; TensorFlow, core/kernels/image,
scale_and_translate_op and crop_and_resize_op.
"""

import io
from functools import lru_cache

import numpy as np
import simplejpeg
from PIL import Image

from contracts import BadInput

FRAME_SHAPE = (256, 256, 3)  # of the frames that the public checkpoints were trained on
CROP_AREA = 0.9  # share of the image's area that the centre crop keeps
# Coefficients of x^3, x^5, x^7 and of x^2, x^4, x^6, x^8 for `_sine`.
SINE = (-0.16666654943701084, 0.008332178146138854, -0.00019517298981385725)
COSINE = (-0.49999999725108224, 0.041666623324344516, -0.001388676379437604, 2.4390450703564542e-05)


def model_input_images(frames: np.ndarray, image_size: int) -> np.ndarray:
    """Process frames like the training data: RGB (..., 256, 256, 3), see `to_levels` -> uint8 (..., S, S, 3)."""
    if frames.shape[-3:] != FRAME_SHAPE:
        raise BadInput(f"images of the shape {frames.shape[-3:]}: give {FRAME_SHAPE}: height, width, RGB")
    frames = to_levels(frames)
    images = np.empty((*frames.shape[:-3], image_size, image_size, 3), dtype=np.uint8)
    for index in np.ndindex(frames.shape[:-3]):
        image = decode_jpeg(encode_jpeg(frames[index]))
        planes = np.ascontiguousarray(image.transpose(2, 0, 1))
        cropped = centre_crop(lanczos_resize(planes, image_size))
        np.stack(list(cropped), axis=-1, out=images[index])
    return images


def to_levels(images: np.ndarray) -> np.ndarray:
    """Images as uint8 grey levels: uint8 as it is, floats from 0 to 1 times 255. Raises BadInput for all others."""
    if images.dtype == np.uint8:
        return images
    is_share = np.issubdtype(images.dtype, np.floating) and images.min() >= 0 and images.max() <= 1
    if not is_share:
        raise BadInput(
            f"images of {images.dtype} from {images.min():g} to {images.max():g}: give uint8, or floats from 0 to 1"
        )
    return np.rint(images * 255).astype(np.uint8)


def encode_jpeg(image: np.ndarray) -> bytes:
    """Compress uint8 (H, W, 3) RGB to JPEG like the training data of OpenVLA-OFT: quality 95, chroma 4:2:0.

    TensorFlow encodes with the accurate DCT, as Pillow does, and decodes with the fast one, as only simplejpeg does.
    """
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=95, subsampling="4:2:0")
    return file.getvalue()


def decode_jpeg(data: bytes) -> np.ndarray:
    """Decode a JPEG file to uint8 (H, W, 3) RGB."""
    return simplejpeg.decode_jpeg(data, colorspace="RGB", fastdct=True, fastupsample=False)


def lanczos_resize(planes: np.ndarray, size: int) -> np.ndarray:
    """Resize uint8 (3, H, W) -> uint8 (3, size, size): antialiased Lanczos-3, vertically first, half to even."""
    source = np.ascontiguousarray(planes.transpose(1, 0, 2), dtype=np.float32)  # (H, 3, W)
    rows = _weighted_sums(source, size)  # (size, 3, W)
    columns = _weighted_sums(np.ascontiguousarray(rows.transpose(2, 1, 0)), size)  # (size, 3, size), x first
    levels = np.clip(np.rint(columns), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(1, 2, 0))


def _weighted_sums(source: np.ndarray, size: int) -> np.ndarray:
    """Resize the first axis: (num_in, 3, L) -> (size, 3, L).

    The products are added one by one in float32, because BLAS would add them in another order and round differently.
    """
    inputs, weights = _taps(len(source), size)
    sums = np.take(source, inputs[0], axis=0) * weights[0]
    product = np.empty_like(sums)
    for tap, weight in zip(inputs[1:], weights[1:], strict=True):
        # mode="clip", because the default mode writes to a buffer first. It clips nothing: all indices are in range.
        np.take(source, tap, axis=0, out=product, mode="clip")
        product *= weight
        sums += product
    return sums


@lru_cache(maxsize=16)
def _taps(num_in: int, num_out: int) -> tuple[np.ndarray, np.ndarray]:
    """The T inputs in order that each output of a resize sums up, (T, num_out), and their weights (T, num_out, 1, 1).

    Where an output has fewer than T inputs, the rest have weight 0.
    """
    matrix = lanczos_weights(num_in, num_out)
    is_used = matrix != 0
    first = is_used.argmax(axis=1)
    last = num_in - 1 - is_used[:, ::-1].argmax(axis=1)
    inputs = first + np.arange((last - first).max() + 1)[:, None]
    clipped = np.minimum(inputs, num_in - 1)
    weights = np.where(inputs < num_in, np.take_along_axis(matrix.T, clipped, axis=0), np.float32(0))
    return clipped, weights[..., None, None]


def lanczos_weights(num_in: int, num_out: int) -> np.ndarray:
    """Weights (num_out, num_in) float32 of TensorFlow's resize with antialias=True; row i makes output i.

    The kernel is stretched by the reduction factor, sampled at pixel centres, cut off at the border and normalised.
    """
    one = np.float32(1)
    half = np.float32(0.5)
    radius = np.float32(3)
    inverse_scale = one / np.float32(num_out / num_in)
    stretch = max(inverse_scale, one)
    weights = np.zeros((num_out, num_in), dtype=np.float32)
    for i in range(num_out):
        centre = (np.float32(i) + half) * inverse_scale
        start = max(int(np.ceil(centre - radius * stretch - half)), 0)
        stop = min(int(np.floor(centre + radius * stretch - half)), num_in - 1) + 1
        distance = np.abs((np.arange(start, stop, dtype=np.float32) + half - centre) * (one / stretch))
        kernel = _lanczos_kernel(distance, radius)
        total = np.add.accumulate(kernel)[-1]  # added one by one in float32, unlike NumPy's pairwise sum
        weights[i, start:stop] = kernel * (one / total)
    return weights


def _lanczos_kernel(distance: np.ndarray, radius: np.float32) -> np.ndarray:
    """sinc(x) sinc(x / radius) of distances x >= 0, float32; 0 beyond the radius."""
    pi = np.float32(np.pi)
    near_zero = np.float32(1e-3)  # for distances up to this TensorFlow returns 1
    x = np.maximum(distance, near_zero)
    kernel = radius * _sine(pi * x) * _sine(pi * x / radius) / (pi * pi * x * x)
    kernel = np.where(distance <= near_zero, np.float32(1), kernel)
    return np.where(distance > radius, np.float32(0), kernel)


def _sine(x: np.ndarray) -> np.ndarray:
    """sin(x) for float32 x up to 120, with the same bits as sinf of glibc 2.28 and newer, which TensorFlow calls.

    These bits are not always the nearest float32. Source of the polynomials, which are computed in float64: glibc,
    sysdeps/ieee754/flt-32/s_sincosf.h.
    """
    quarters = np.rint(x.astype(np.float64) * (2 / np.pi))
    remainder = x - quarters * (np.pi / 2)
    square = remainder * remainder
    fourth = square * square
    sine = (
        remainder + remainder * square * SINE[0] + remainder * square * square * (SINE[1] + square * SINE[2])
    )
    cosine = 1 + square * COSINE[0] + fourth * COSINE[1] + fourth * square * (COSINE[2] + square * COSINE[3])
    is_odd_quarter = quarters % 2 == 1
    is_second_half = quarters % 4 >= 2
    turned = np.where(is_odd_quarter, cosine, sine)
    return np.where(is_second_half, -turned, turned).astype(np.float32)


def centre_crop(planes: np.ndarray) -> np.ndarray:
    """Enlarge the middle 90 % of the area: uint8 (3, S, S) -> uint8 (3, S, S), bilinear, horizontally first."""
    low, high, fraction = _crop_taps(planes.shape[-1])
    unit = np.float32(1 / 255)
    left = np.take(planes, low, axis=2).astype(np.float32) * unit
    right = np.take(planes, high, axis=2).astype(np.float32) * unit
    rows = _interpolate(left, right, fraction)
    cropped = _interpolate(np.take(rows, low, axis=1), np.take(rows, high, axis=1), fraction[:, None])
    clipped = np.clip(cropped, 0, 1, out=cropped)
    # TensorFlow converts to grey levels by floor(255.5 x), which is not the same as rounding 255 x.
    return (clipped * np.float32(255.5)).astype(np.uint8)


def _interpolate(first: np.ndarray, second: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """first + (second - first) * fraction, computed in place in `second`."""
    second -= first
    second *= fraction
    second += first
    return second


@lru_cache(maxsize=16)
def _crop_taps(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each output pixel, at the corners those of the crop, two source pixels and the second's weight, (S,) each."""
    side = np.sqrt(np.float32(CROP_AREA))
    last = np.float32(size - 1)
    start = (np.float32(1) - side) / np.float32(2)
    step = (start + side - start) * last / last  # rounded in TensorFlow's order
    positions = start * last + np.arange(size, dtype=np.float32) * step
    low = np.floor(positions)
    return low.astype(np.intp), np.ceil(positions).astype(np.intp), positions - low
