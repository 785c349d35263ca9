"""Progress is for terminals; time spans read as people write them."""

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl.progress import TerminalHandler, duration, progress_bar


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (45.4, "45 s"),
        (89, "89 s"),
        (90, "2 min"),
        (720, "12 min"),
        (89 * 60, "89 min"),
        (90 * 60, "1 h 30 min"),
        (3 * 3600 + 300, "3 h 05 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("total", [None, 100])
def test_a_log_file_gets_nothing(total, capsys):
    with progress_bar("rollout", total) as advance:
        advance(30)
        advance(500)  # whole episodes go beyond the total
    captured = capsys.readouterr()
    assert captured.out.strip() == captured.err.strip() == ""


def test_lines_go_to_whatever_stdout_is_now(capsys):
    handler = TerminalHandler()
    handler.emit(logging.makeLogRecord({"msg": "a line"}))
    assert capsys.readouterr().out == "a line\n"


SCRIPT = """
import logging
from rl.progress import TerminalHandler, progress_bar
logging.basicConfig(handlers=[TerminalHandler()], level="INFO", format="%(message)s")
with progress_bar("rollout", 100) as advance:
    advance(60)
    logging.info("a line while the bar is shown")
logging.info("a line after it")
"""


def run_script(stdout: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm", "COLUMNS": "80"}
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", SCRIPT], stdout=stdout, cwd=root, env=environment, check=True, timeout=120)


def test_a_file_gets_lines_and_no_control_characters(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        run_script(file.fileno())
    lines = (tmp_path / "log").read_bytes().decode().split("\n")
    assert [line for line in lines if line] == ["a line while the bar is shown", "a line after it"]


def test_a_terminal_gets_the_bar_and_whole_lines_above_it():
    ours, theirs = pty.openpty()
    run_script(theirs)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "rollout" in shown
    assert "60/100" in shown
    assert screen_lines(shown)[:2] == ["a line while the bar is shown", "a line after it"]


def screen_lines(output: str) -> list[str]:
    """What a terminal shows after the output: carriage return, line feed, cursor up and erase line are followed."""
    lines, row, column = [""], 0, 0
    for piece in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r|\n)", output):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row, column = row + 1, 0
            lines += [""] * (row - len(lines) + 1)
        elif piece.endswith("A") and piece.startswith("\x1b"):
            row -= int(piece[2:-1] or 1)
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return [line.rstrip() for line in lines if line.strip()]
