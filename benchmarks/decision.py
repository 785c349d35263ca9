"""One thread of a CPU: a checkpoint's decisions, and the preprocessing of camera frames.

    python -m benchmarks.decision [CHECKPOINT]

Medians of `repeats` calls after two that are not counted.
"""

import os
from dataclasses import dataclass

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"  # read when NumPy is loaded

import torch  # noqa: E402
import tyro  # noqa: E402

from benchmarks.gpu import observations, timed  # noqa: E402
from vla.loading import LoadOptions  # noqa: E402
from vla.policy import Policy  # noqa: E402


@dataclass(frozen=True)
class Args:
    checkpoint: tyro.conf.Positional[str] = "checkpoints/tiny-libero-spatial"
    """Folder or hub id."""
    task_suite: str = "libero_spatial"
    batch: int = 1
    """Observations per call."""
    repeats: int = 50


def main(args: Args) -> None:
    torch.set_num_threads(1)
    policy = Policy.load(args.checkpoint, LoadOptions(task_suite=args.task_suite, device="cpu"))
    seen = observations(policy, args.batch, prepared=False)
    whole = timed(lambda: policy.act(seen), args.repeats)
    preprocessing = timed(lambda: [policy.prepare(one.images) for one in seen], args.repeats)
    with policy.teacher():
        teacher = timed(lambda: policy.act(seen), args.repeats)
    print(f"{policy.num_images} image(s), {args.batch} observation(s) a call, one thread")
    print(f"{'one call':>16} {1e3 * whole:7.1f} ms")
    print(f"{'of it images':>16} {1e3 * preprocessing:7.1f} ms, {preprocessing / whole:.0%}")
    print(f"{'adapters off':>16} {1e3 * teacher:7.1f} ms")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
