"""The README.md of a fine-tuned policy: what it is, how it was made, and the hashes of its files.

    python -m vla.sft_card --checkpoint FOLDER [--evaluation TEXT_FILE]

Training writes it without an evaluation; results are measured afterwards and given as a text file.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from command_line import main_guard, parse_flags
from errors import BadInput
from untrusted.json_file import read_json
from untrusted.plain_file import check_plain, reason
from vla.settings import CardArgs

RUN_FILE = "sft_run.json"  # how the policy was made, written by vla.sft
CARD_FILE = "README.md"
LARGEST_FILE = 100_000_000_000  # bytes


def write_card(folder: Path, evaluation: str | None = None) -> Path:
    """Write the folder's README.md and return its path. Raises BadInput without a whole sft_run.json."""
    run = read_json(folder / RUN_FILE)
    try:
        card = model_card(folder.name, run, file_rows(folder), evaluation)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # fields of another type
        raise BadInput(f"{folder / RUN_FILE}: is not what vla.sft writes ({type(error).__name__}: {error})") from error
    path = folder / CARD_FILE
    path.write_text(card, encoding="utf-8")
    return path


def file_rows(folder: Path) -> list[tuple[str, int, str]]:
    """(name, bytes, sha256) of every file of the folder but the card itself.

    Raises BadInput for giants and for what the system does not let be read.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CARD_FILE)
    return [(path.name, path.stat().st_size, _sha256(path)) for path in paths]


def _sha256(path: Path) -> str:
    if check_plain(path) > LARGEST_FILE:
        raise BadInput(f"{path}: has {path.stat().st_size:,} bytes, no file of a policy is that large; remove it")
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({reason(error)})") from error
    return digest.hexdigest()


def model_card(name: str, run: dict[str, Any], files: list[tuple[str, int, str]], evaluation: str | None = None) -> str:
    """Markdown. `run` is the content of sft_run.json."""
    data, network, arguments = run["data"], run["network"], run["arguments"]
    learner = arguments["learner"]
    lines = [
        f"# {name}",
        "",
        f"A small policy in the folder format of OpenVLA-OFT: {network['parameters']:,} parameters, of which "
        f"{network['vocabulary_parameters']:,} are the two vocabulary matrices, nearly all zero. "
        f"It sees {['one image', 'two images'][network['num_images'] - 1]} of {network['image_size']} pixels "
        f"({network['image_tokens']} tokens), the instruction{' and the robot state' if network['proprio'] else ''}, "
        "and answers with a chunk of 8 actions as 56 tokens.",
        "The weights were trained from random ones by this project and come under the project's licence."
        if arguments["init"] is None
        else f"The weights were fine-tuned from `{arguments['init']}`, whose licence holds for them too.",
        "",
        "## How it was made",
        "",
        "Supervised fine-tuning by `vla.sft` on demonstrations of a scripted expert in simulation:",
        "",
        "```",
        run["command"],
        "```",
        "",
        f"* data: {data['train_episodes']:,} episodes with {data['train_frames']:,} frames "
        f"({data['held_out_episodes']:,} more episodes held out), statistics key `{data['statistics_key']}`; "
        + "instructions: "
        + ", ".join(f'"{instruction}"' for instruction in data["instructions"]),
        f"* {run['steps']:,} steps of {learner['batch_size']} frames, seed {learner['seed']}, "
        f"{run['seconds'] / 60:.0f} min on {run['device']}",
        f"* code: {run['commit'] or 'not from a git checkout'}; " + ", ".join(
            f"{package} {version}" for package, version in run["versions"].items()
        ),
        f"* weights stored as {arguments['save_dtype']}",
        "",
        *(["## Evaluation", "", evaluation.strip(), ""] if evaluation else []),
        "## Files",
        "",
        "| file | bytes | sha256 |",
        "|---|---|---|",
        *(f"| {file} | {size:,} | `{digest}` |" for file, size, digest in files),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_run(folder: Path, run: dict[str, Any]) -> None:
    """sft_run.json, from which the card is written, now or again with an evaluation."""
    (folder / RUN_FILE).write_text(json.dumps(run, indent=2, default=str) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> None:
    args = parse_flags(CardArgs, argv, prog="python -m vla.sft_card")
    try:
        evaluation = None if args.evaluation is None else args.evaluation.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--evaluation {args.evaluation} cannot be read ({error.strerror}): name a text file") from None
    print(f"wrote {write_card(args.checkpoint, evaluation)}")


if __name__ == "__main__":
    sys.exit(main_guard("vla.sft_card", main))
