"""Time from camera frames to pixel values, on one thread: python -m benchmarks.preprocessing

Prints for 1 and 2 images and for a batch the median and the best of many runs (they differ on a busy machine), and
each stage's share of one image.
"""

import os
import time
from collections.abc import Callable

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # read when NumPy is loaded

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from vla.preprocessing import ImageProcessor, jpeg_round_trip, model_input_images, pixel_values  # noqa: E402
from vla.resampling import centre_crop, lanczos_resize  # noqa: E402

PROCESSOR = ImageProcessor(
    image_size=224,
    means=((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5)),
    stds=((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5)),
    interpolations=(Image.Resampling.BICUBIC,) * 2,
)


def measure_ms(function: Callable[[], object], repeats: int = 200) -> tuple[float, float]:
    """(median, best) in milliseconds."""
    function()  # the first call computes the weights
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times)), 1e3 * min(times)


def make_frames(num_images: int) -> np.ndarray:
    """uint8 (num_images, 256, 256, 3): colour gradients with noise, about as compressible as rendered frames."""
    y, x = np.mgrid[0:256, 0:256]
    gradients = np.stack([x, y, (x + y) / 2], axis=-1)
    noise = np.random.default_rng(0).normal(0, 4, (num_images, 256, 256, 3))
    return np.clip(gradients + noise, 0, 255).astype(np.uint8)


def preprocess(frames: np.ndarray) -> np.ndarray:
    return pixel_values(model_input_images(frames, PROCESSOR.image_size), PROCESSOR)


def main() -> None:
    frames = make_frames(16)
    print("preprocess: frames 256 x 256 -> pixel values 6 x 224 x 224 each, one thread: median (best)")
    batches = {"1 image": frames[:1], "2 images": frames[:2], "8 x 2 images": frames.reshape(8, 2, 256, 256, 3)}
    for label, batch in batches.items():
        median, best = measure_ms(lambda batch=batch: preprocess(batch))
        print(f"  {label:<14} {median:7.2f} ms ({best:.2f})")

    planes = np.ascontiguousarray(frames[0].transpose(2, 0, 1))
    resized = lanczos_resize(planes, 224)
    images = model_input_images(frames[:1], 224)
    stages = {
        "JPEG round trip": lambda: jpeg_round_trip(frames[0]),
        "Lanczos resize": lambda: lanczos_resize(planes, 224),
        "centre crop": lambda: centre_crop(resized),
        "pixel values": lambda: pixel_values(images, PROCESSOR),
    }
    _, total = measure_ms(lambda: preprocess(frames[:1]))
    times = {name: measure_ms(stage)[1] for name, stage in stages.items()}
    times["layout changes"] = total - sum(times.values())
    print("share of one image, best")
    for name, milliseconds in times.items():
        print(f"  {name:<16} {milliseconds:6.3f} ms {milliseconds / total:6.1%}")


if __name__ == "__main__":
    main()
