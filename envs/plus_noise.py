"""The noise of LIBERO-Plus on a camera's picture: five kinds of ten severities each.

All functions take and return a uint8 picture (256, 256, 3) as the simulator delivers it, upside down. The severities
are those of the published code, which draws from NumPy's global generator; here the caller gives one.
"""

import numpy as np

# By severity: radius and standard deviation of the motion blur, in pixels.
MOTION = ((5, 2), (8, 3), (10, 4), (12, 5), (15, 6), (18, 8), (20, 10), (25, 12), (30, 15), (35, 20))
ZOOM_STEP = (0.01, 0.01, 0.02, 0.02, 0.03, 0.01, 0.01, 0.02, 0.02, 0.03)  # between the zoom factors
FOG_DECAY = (3, 2.8, 2.5, 2.2, 2.0, 1.8, 1.6, 1.5, 1.4, 1.3)
GLASS_SIGMA = (0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.5, 1.8, 2.2, 2.5)
GLASS_REACH = (1, 1, 2, 2, 3, 3, 4, 4, 5, 5)  # of the shuffling, in pixels
GLASS_PASSES = (3, 3, 3, 2, 2, 2, 2, 2, 1, 1)
GLASS_SIZE = 224  # the published code shuffles as if pictures had this many rows and columns


def published_noise(picture: np.ndarray, noise: int, rng: np.random.Generator) -> np.ndarray:
    """The picture with the noise of a number in the published list: from 1, 10 severities of a kind, then the next."""
    kinds = (_motion_blur, _gaussian_blur, _zoom_blur, _fog, _glass)
    kind, severity = divmod(noise - 1, len(FOG_DECAY))
    return kinds[kind](picture, severity, rng)


def _as_bytes(picture: np.ndarray) -> np.ndarray:
    """A picture from 0 to 1 as bytes; fractions are cut off, as in the published code."""
    return (np.clip(picture, 0, 1) * 255).astype(np.uint8)


def _blurred(picture: np.ndarray, sigma: float) -> np.ndarray:
    from scipy import ndimage  # takes half a second, which --help does not need

    return ndimage.gaussian_filter(picture, (sigma, sigma, 0), mode="nearest", truncate=4.0)


def _gaussian_blur(picture: np.ndarray, severity: int, _: np.random.Generator) -> np.ndarray:
    return _as_bytes(_blurred(picture / 255, severity + 1))


def _motion_blur(picture: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Blur in one direction, as ImageMagick's MotionBlurImage: half a Gaussian bell along a line of pixels."""
    radius, sigma = MOTION[severity]
    angle = np.radians(rng.uniform(-45, 45))
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    columns = np.ceil(steps * np.cos(angle) - 0.5).astype(int)
    rows = np.ceil(steps * np.sin(angle) - 0.5).astype(int)
    pixels = np.arange(len(picture))
    blurred = np.zeros(picture.shape)
    for weight, row, column in zip(weights, rows, columns, strict=True):
        shifted = np.clip([pixels + row, pixels + column], 0, len(picture) - 1)
        blurred += weight * picture[shifted[0][:, None], shifted[1]]
    return np.rint(blurred).astype(np.uint8)


def _zoom_blur(picture: np.ndarray, severity: int, _: np.random.Generator) -> np.ndarray:
    """The mean of the picture and of its enlargements."""
    largest = round(1.11 + 0.05 * severity, 2)  # not reached
    factors = np.arange(1, largest, ZOOM_STEP[severity])
    original = (picture / 255).astype(np.float32)
    total = original.copy()
    for factor in factors:
        total += _enlarged(original, factor)
    return _as_bytes(total / (len(factors) + 1))


def _enlarged(picture: np.ndarray, factor: float) -> np.ndarray:
    """The middle of the picture, enlarged to its size."""
    from scipy import ndimage

    size = len(picture)
    crop = int(np.ceil(size / factor))
    start = (size - crop) // 2
    middle = picture[start : start + crop, start : start + crop]
    large = ndimage.zoom(middle, (factor, factor, 1), order=1)
    margin = (len(large) - size) // 2
    return large[margin : margin + size, margin : margin + size]


def _fog(picture: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    strength = 0.5 * (severity + 1)
    original = picture / 255
    brightest = original.max()
    foggy = original + strength * _fractal(len(picture), FOG_DECAY[severity], rng)[:, :, None]
    return _as_bytes(foggy * brightest / (brightest + strength))


def _fractal(size: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """A random landscape (size, size) from 0 to 1 that repeats at its edges, by the diamond-square algorithm."""
    heights = np.zeros((size, size))
    step = size
    roughness = 100.0

    def means(sums: np.ndarray) -> np.ndarray:
        return sums / 4 + roughness * rng.uniform(-roughness, roughness, sums.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=0)
        heights[half::step, half::step] = means(pairs + np.roll(pairs, -1, axis=1))
        centres = heights[half::step, half::step]
        rows = centres + np.roll(centres, 1, axis=0) + corners + np.roll(corners, -1, axis=1)
        heights[::step, half::step] = means(rows)
        columns = centres + np.roll(centres, 1, axis=1) + corners + np.roll(corners, -1, axis=0)
        heights[half::step, ::step] = means(columns)
        step = half
        roughness /= decay
    heights -= heights.min()
    return heights / heights.max()


def _glass(picture: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Blur, shuffle pixels locally, blur again.

    The published code means to swap neighbours but copies one over the other, which is repeated here.
    """
    sigma = GLASS_SIGMA[severity]
    reach = GLASS_REACH[severity]
    width = picture.shape[1]
    pixels = _as_bytes(_blurred(picture / 255, sigma)).reshape(-1, 3)
    coordinates = np.arange(GLASS_SIZE - reach, reach, -1)
    places = (coordinates[:, None] * width + coordinates).ravel().tolist()
    source = list(range(len(pixels)))  # for every place the pixel that is copied there
    for _ in range(GLASS_PASSES[severity]):
        offsets = rng.integers(-reach, reach, (len(places), 2)) @ (1, width)
        for place, offset in zip(places, offsets.tolist(), strict=True):
            source[place] = source[place + offset]
    shuffled = pixels[source].reshape(picture.shape)
    return _as_bytes(_blurred(shuffled / 255, sigma))
