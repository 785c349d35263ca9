"""TensorFlow's Lanczos resize and centre crop in NumPy.

OpenVLA-OFT was trained and is evaluated on frames that went through these TensorFlow kernels (core/kernels/image:
scale_and_translate_op, crop_and_resize_op). Their float32 arithmetic is followed in type and order, because the last
bit of a value next to x.5 decides a grey level. So results depend on no processor, thread or batch either. Every
function takes one image as colour planes (3, H, W), which keeps rows and columns contiguous.
"""

from functools import lru_cache

import numpy as np

CROP_AREA = 0.9


def lanczos_resize(planes: np.ndarray, size: int) -> np.ndarray:
    """uint8 (3, H, W) -> uint8 (3, size, size): antialiased Lanczos-3, rounded half to even.

    Vertical first, then horizontal, as TensorFlow does: the other order rounds a few pixels differently.
    """
    rows = _weighted_sums(np.ascontiguousarray(planes.transpose(1, 0, 2), dtype=np.float32), size)  # (size, 3, W)
    columns = _weighted_sums(np.ascontiguousarray(rows.transpose(2, 1, 0)), size)  # (size, 3, size): x, channel, y
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
    """Weights (num_out, num_in) float32 with rows that sum to 1, as TensorFlow computes them for antialias=True.

    The kernel is stretched by the reduction factor (never shrunk), sampled at pixel centres, cut off at the border and
    renormalised.
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
        kernel = radius * _sine(pi * safe) * _sine(pi * safe / radius) / (pi * pi * safe * safe)  # sinc(x) sinc(x / 3)
        kernel = np.where(x > radius, np.float32(0), np.where(x <= np.float32(1e-3), one, kernel))
        total = np.add.accumulate(kernel)[-1]  # one after the other in float32, not NumPy's pairwise sum
        weights[i, start:stop] = kernel * (one / total)
    return weights


def _sine(x: np.ndarray) -> np.ndarray:
    """Correctly rounded float32, as the C library's is; NumPy's float32 sine depends on the processor."""
    return np.sin(x.astype(np.float64)).astype(np.float32)


def centre_crop(planes: np.ndarray) -> np.ndarray:
    """uint8 (3, S, S) -> uint8 (3, S, S): the middle 90 % of the area, enlarged to the old size bilinearly.

    Over float32 in [0, 1], horizontally first; back by floor(255.5 x), TensorFlow's way, which is not rounding 255 x.
    """
    low, high, fraction = _crop_taps(planes.shape[-1])
    unit = np.float32(1 / 255)
    left, right = (np.take(planes, taps, axis=2).astype(np.float32) * unit for taps in (low, high))
    rows = _interpolate(left, right, fraction)
    cropped = _interpolate(np.take(rows, low, axis=1), np.take(rows, high, axis=1), fraction[:, None])
    return (np.clip(cropped, 0, 1, out=cropped) * np.float32(255.5)).astype(np.uint8)


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
