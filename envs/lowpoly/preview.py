"""Pictures of tasks as the policy's cameras see them, to look at while working on the looks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from envs.libero import EnvSpec, LiberoEnv


def render_tasks(tasks: Sequence[tuple[str, int]], folder: Path) -> list[Path]:
    """Writes one picture for each (suite, task id): agentview and wrist side by side, and all of them in sheet.png."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task_suite, task_id in tasks:
        env = LiberoEnv(EnvSpec(task_suite=task_suite, task_ids=(task_id,), num_images=2), task_id)
        observation = env.reset(init_state_id=0).observation
        env.close()
        assert observation is not None, "a reset that was asked to observe brings an observation"
        # Observations are turned by 180 degrees for the policy, which leaves them mirrored: people see them unmirrored.
        picture = np.concatenate([image[:, ::-1] for image in observation.images], axis=1)
        written.append(folder / f"{task_suite}_{task_id}.png")
        Image.fromarray(picture).save(written[-1])
    contact_sheet(written, columns=2).save(folder / "sheet.png")
    return written


def contact_sheet(files: Sequence[Path], columns: int) -> Image.Image:
    """Pictures of equal size in rows, in reading order."""
    pictures = [Image.open(file) for file in files]
    width, height = pictures[0].size
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (min(columns, len(pictures)) * width, rows * height), "white")
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % columns * width, index // columns * height))
    return sheet
