"""`--help` of every command line: a text, a unit and a default for each flag, and no wait for heavy imports."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = (
    "train_grpo", "eval", "rl.report", "vla.merge",
)  # fmt: skip
HEAVY = ("torch", "transformers", "timm", "peft", "mujoco", "robosuite", "libero", "wandb", "matplotlib", "scipy")

# What a number may be counted in; the help text of each numeric flag names one of them ...
UNITS = (
    "env steps", "episodes", "decisions", "optimizer step", "updates", "passes", "hours", "minutes", "milliseconds",
    "gib", "nats", "states", "simulators", "observations", "checkpoints", "pixels", "frames", "bins", "blocks", "heads",
    "images", "threads", "numbers per token", "metres", "task ids", "units of the return", "0 to 1", "share", "norm",
    "success rate", "id of the initial state",
)  # fmt: skip
# ... unless it is a number without one.
DIMENSIONLESS = {
    "--seed", "--lora-rank", "--lora-alpha", "--temperature", "--distill-temperature", "--distill-student-temperature",
    "--clip-high", "--value-coef",
}  # fmt: skip

PROGRAM = """
import runpy, sys
sys.path.insert(0, {root!r})
sys.argv[1:] = {argv!r}
try:
    runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
finally:
    print("imported:", *sorted(set({heavy!r}) & set(sys.modules)))
"""


@cache
def run(module: str, *argv: str) -> subprocess.CompletedProcess:
    program = PROGRAM.format(root=str(ROOT), argv=list(argv), module=module, heavy=HEAVY)
    environ = {**os.environ, "COLUMNS": "100"}
    return subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=300)


def entries(module: str) -> dict[str, str]:
    """Flag -> all that the help says about it."""
    found: dict[str, str] = {}
    for line in run(module, "--help").stdout.splitlines():
        inside = line.strip("│").rstrip()
        if re.match(r" --[a-z]", inside):
            flag = inside.split()[0].rstrip(",")
            found[flag] = ""
        if line.startswith("│") and found:
            found[flag] += inside + " "
    return {flag: re.sub(r"\s+", " ", text.replace("─", "")) for flag, text in found.items()}


@pytest.mark.parametrize("module", COMMANDS)
def test_help_is_there_without_heavy_imports(module):
    asked = run(module, "--help")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.splitlines()[-1] == "imported:"


@pytest.mark.parametrize("module", COMMANDS)
def test_a_wrong_flag_is_answered_in_one_line_without_heavy_imports(module):
    refused = run(module, "--no-such-flag")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert "--no-such-flag" in refused.stderr or "Missing" in refused.stderr
    assert refused.stdout.splitlines() == ["imported:"]


@pytest.mark.parametrize("module", COMMANDS)
def test_every_flag_says_what_it_is_and_its_default(module):
    assert entries(module)
    for flag, text in entries(module).items():
        assert re.search(r"\(default: .*\)|\(required\)", text), flag
        said = re.sub(r"\(default: [^()]*\)|\(required\)|--\S+|\S*[A-Z]{3,}\S*|\{\S+\}", "", text)
        assert len(re.findall(r"[a-z]{2,}", said)) >= 2, (flag, text)


@pytest.mark.parametrize("module", COMMANDS)
def test_every_number_has_a_unit_or_is_known_to_have_none(module):
    for flag, text in entries(module).items():
        if re.search(r"\b(INT|FLOAT)\b", text) and flag not in DIMENSIONLESS:
            assert any(unit in text.lower() for unit in UNITS), (flag, text)


def test_numbers_without_a_unit_are_flags_that_exist():
    assert {flag for module in COMMANDS for flag in entries(module)} >= DIMENSIONLESS
