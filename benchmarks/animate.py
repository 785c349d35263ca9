"""Put episodes before and after training side by side, in one animated picture.

    python eval.py --checkpoint BEFORE --task-ids 0 --mode sample --trials 8 --video all --out before.json
    python eval.py --checkpoint AFTER --task-ids 0 --mode sample --trials 8 --video all --out after.json
    python -m benchmarks.animate before.json after.json OUT.webp

The upper row plays the episodes of the first file, the lower row those of the second, twice as fast as the robot moves.
A green border is a success, a red one a failure. An episode that has ended shows its last picture until all have ended.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import numpy.typing as npt
import tyro
from PIL import Image

from command_line import main_guard, parse_flags
from contracts import BadInput
from experiment.episodes import EpisodeResult
from experiment.results import read_results
from experiment.stored_run import FRAMES_PER_SECOND

Pictures = npt.NDArray[np.uint8]  # (T, side, side, 3), T pictures of an episode

SIDE = 104  # pixels of an episode's picture
EVERY = 5  # every how many pictures of a video one is shown
FASTER = 2  # than the robot moves
BORDER = 3  # pixels
GREEN = (26, 150, 65)
RED = (200, 40, 40)


@dataclass(frozen=True)
class Args:
    # Results files of eval.py, played with --video all.
    before: tyro.conf.Positional[Path]
    after: tyro.conf.Positional[Path]
    # Picture to write, .webp or .gif.
    out: tyro.conf.Positional[Path]


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.animate", description=__doc__)
    rows = [read_row(results) for results in (args.before, args.after)]
    length = max(len(pictures) for row in rows for pictures in row)
    table = np.concatenate(
        [np.concatenate([hold_last(each, length) for each in row], axis=2) for row in rows], axis=1
    )
    first, *later = [Image.fromarray(picture) for picture in table]
    milliseconds = 1000 * EVERY / FRAMES_PER_SECOND / FASTER
    args.out.parent.mkdir(parents=True, exist_ok=True)
    first.save(args.out, save_all=True, append_images=later, duration=milliseconds, loop=0, quality=35)
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e3:.1f} kB")


def read_row(results: Path) -> list[Pictures]:
    """The pictures of each episode of a results file. Raises BadInput if one has no video."""
    videos = results.with_name(f"{results.stem}-videos")
    return [read_pictures(videos, episode) for episode in read_results(results).episodes]


def read_pictures(videos: Path, episode: EpisodeResult) -> Pictures:
    """Some pictures of an episode, small and with a border that says how it ended; its last one is among them."""
    if episode.video is None:
        raise BadInput(f"{videos} lacks episodes: play them by eval.py --video all")
    frames = imageio.mimread(videos / episode.video, memtest=False)
    chosen = [*frames[:-1:EVERY], frames[-1]]
    pictures = np.stack([np.asarray(Image.fromarray(frame).resize((SIDE, SIDE))) for frame in chosen])
    inside = slice(BORDER, -BORDER)
    bordered = np.empty_like(pictures)
    bordered[:] = GREEN if episode.success else RED
    bordered[:, inside, inside] = pictures[:, inside, inside]
    return bordered


def hold_last(pictures: Pictures, length: int) -> Pictures:
    """The pictures, and then the last one until there are `length`."""
    return np.concatenate([pictures, np.repeat(pictures[-1:], length - len(pictures), axis=0)])


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.animate", main))
