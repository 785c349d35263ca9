"""Draw a moving picture of a policy before and after training: the same episodes, one above the other.

    python -m benchmarks.before_after --checkpoint CHECKPOINT --adapter RUN/checkpoints/latest --out before_after.webp

Greedy episodes from the benchmark's first initial states, none of them chosen: a column for each, the checkpoint alone
above, with the adapter below. An episode has a green frame from its start if it succeeds, else a red one. Its last
picture stands still. A line above each row counts the successes. Prints these counts, too.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

from command_line import main_guard, parse_flags
from envs.env import EnvSpec, Start
from envs.libero import LiberoEnv
from vla.loading import LoadOptions
from vla.policy import Policy

FRAME_STRIDE = 3  # one frame of so many is kept
MILLISECONDS = 100  # that a frame is shown: one and a half times as fast as the robot
FRAMES_AT_END = 15  # that the last picture stands
CELL_SIDE = 128  # pixels
BORDER = 4  # pixels
TITLE_HEIGHT = 20  # pixels
QUALITY = 50  # of WebP, 0 to 100
SUCCESS_COLOUR = "#1a9850"
FAILURE_COLOUR = "#d73027"


@dataclass(frozen=True)
class Args:
    # Folder or hub id of the policy before.
    checkpoint: str
    # Folder of the adapters that were trained on it.
    adapter: str
    # File to write, .webp or .gif.
    out: Path = Path("before_after.webp")
    # Suite of the task.
    task_suite: str = "libero_spatial"
    # Task id within the suite.
    task_id: int = 0
    # Columns: the first initial states.
    num_states: int = 6
    # Looks: lowpoly, official or a folder.
    assets: str = "lowpoly"
    # Where the policy runs: auto, cpu or cuda.
    device: str = "auto"


@dataclass(frozen=True)
class Clip:
    """One episode: small pictures, and how it ended."""

    frames: list[Image.Image]
    success: bool

    def frame_at(self, index: int) -> Image.Image:
        """The picture with this index, or the last one; the colour of its frame is the outcome's."""
        picture = self.frames[min(index, len(self.frames) - 1)].copy()
        colour = SUCCESS_COLOUR if self.success else FAILURE_COLOUR
        ImageDraw.Draw(picture).rectangle((0, 0, CELL_SIDE - 1, CELL_SIDE - 1), outline=colour, width=BORDER)
        return picture


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m benchmarks.before_after", description=__doc__)
    rows = [play_states(args, folder) for folder in (args.checkpoint, args.adapter)]
    first, *rest = draw(rows)
    first.save(args.out, save_all=True, append_images=rest, duration=MILLISECONDS, loop=0, quality=QUALITY)
    print(f"wrote {args.out}, {args.out.stat().st_size / 1e6:.1f} MB")


def play_states(args: Args, folder: str) -> list[Clip]:
    """Play the policy in `folder` in the first initial states."""
    policy = Policy.load(folder, LoadOptions(args.task_suite, device=args.device))
    env = LiberoEnv(EnvSpec(args.task_suite, (args.task_id,), policy.num_images, args.assets), args.task_id)
    clips = [play(policy, env, init_state_id) for init_state_id in range(args.num_states)]
    env.close()
    print(f"{folder}: {sum(clip.success for clip in clips)} of {len(clips)}", flush=True)
    return clips


def play(policy: Policy, env: LiberoEnv, init_state_id: int) -> Clip:
    """Play one greedy episode, and keep some of its frames."""
    result = env.reset(Start(init_state_id, record=True))
    frames = list(result.frames)
    while result.observation is not None:
        result = env.step_chunk(policy.act([result.observation]).actions[0])
        frames += result.frames
    small = [Image.fromarray(frame).resize((CELL_SIDE, CELL_SIDE)) for frame in frames[::FRAME_STRIDE]]
    return Clip(small, result.success)


def draw(rows: Sequence[Sequence[Clip]]) -> list[Image.Image]:
    """Put the clips into a grid, one picture for each moment, with a title above each of the two rows."""
    length = max(len(clip.frames) for clips in rows for clip in clips)
    row_height = TITLE_HEIGHT + CELL_SIDE
    pictures = []
    for index in range(length + FRAMES_AT_END):
        picture = Image.new("RGB", (CELL_SIDE * len(rows[0]), row_height * len(rows)), "white")
        for row, (name, clips) in enumerate(zip(("before", "after"), rows, strict=True)):
            title = f"{name} training: {sum(clip.success for clip in clips)} of {len(clips)} succeed"
            ImageDraw.Draw(picture).text((BORDER, row * row_height + 2), title, "black", font_size=14)
            for column, clip in enumerate(clips):
                picture.paste(clip.frame_at(index), (column * CELL_SIDE, row * row_height + TITLE_HEIGHT))
        pictures.append(picture)
    return pictures


if __name__ == "__main__":
    sys.exit(main_guard("benchmarks.before_after", main))
