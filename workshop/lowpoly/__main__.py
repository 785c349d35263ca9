"""Write the low-poly pack: python -m workshop.lowpoly OUT"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from configs.cli import main_guard, parse_flags
from workshop.lowpoly import ensure_pack


@dataclass(frozen=True)
class LowpolyArgs:
    """Write the low-poly pack."""

    out: tyro.conf.Positional[Path]
    """Folder that the pack's folder is written into."""


def main(argv: Sequence[str]) -> None:
    print(ensure_pack(parse_flags(LowpolyArgs, argv, prog="python -m workshop.lowpoly").out))


if __name__ == "__main__":
    sys.exit(main_guard("workshop.lowpoly", main))
