"""README and docs/ promise nothing that is not there: flags, commands, tests, files, messages."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PAGES = {page.name: page.read_text() for page in (PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"))}
NOW = {name: text for name, text in PAGES.items() if name != "LOG.md"}  # the log speaks of what is gone, too
OF_OTHERS = {
    "--help", "--ipc", "--upgrade", "--no-deps", "--require-hashes", "--head", "--address", "--num-cpus",
}  # fmt: skip


@cache
def sources() -> list[ast.Module]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    paths = [PROJECT / name for name in listed.splitlines() if not name.startswith("tests/")]
    return [ast.parse(path.read_text()) for path in paths if path.exists()]


@cache
def nodes() -> list[ast.AST]:
    return [node for source in sources() for node in ast.walk(source)]


@cache
def printed() -> list[str]:
    """All texts of the program, with … for what an f-string fills in."""
    texts = []
    for node in nodes():
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


def flags_of_the_program() -> set[str]:
    """Fields of dataclasses, as tyro spells them, and the flags of argparse."""
    fields = {n.target.id for n in nodes() if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    spelled = {text for text in printed() if re.fullmatch(r"--[a-z][a-z0-9_-]*", text)}
    return {f"--{field.replace('_', '-')}" for field in fields} | spelled


def messages() -> list[str]:
    """What stands in backticks in the first column of TROUBLESHOOTING's table of messages."""
    table = PAGES["TROUBLESHOOTING.md"].split("| message | do this |")[1].split("\n\n")[0]
    cells = [row.removeprefix("| ").rsplit(" | ", 1)[0] for row in table.splitlines()[2:]]
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", NOW)
def test_every_flag_exists(page):
    # Flags with underscores are accelerate's.
    named = {
        flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", NOW[page]) if "_" not in flag
    } - OF_OTHERS
    known = flags_of_the_program()
    unknown = {flag for flag in named if flag not in known and flag.replace("--no-", "--") not in known}
    assert not unknown


@pytest.mark.parametrize("page", NOW)
def test_every_test_module_and_file_exists(page):
    text, missing = NOW[page], []
    for path, name in sorted(set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", text))):
        file = PROJECT / path
        if not file.exists() or f"def {name}(" not in file.read_text():
            missing.append(f"{path}::{name}")
    for module in sorted(set(re.findall(r"python -m ((?:benchmarks|envs|rl|vla|workshop)[\w.]*)", text))):
        path = PROJECT / module.replace(".", "/")
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            missing.append(module)
    folders = "benchmarks|configs|docs|envs|rl|scripts|tests|vla|workshop"
    paths = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]+\.(?:py|md|sh|yaml|png)", text))
    assert not missing + sorted(path for path in paths if not (PROJECT / path).exists())


def test_the_tree_of_the_readme_is_the_tree():
    """Every folder and file that is named there exists, and every folder of the program is named."""
    tree = PAGES["README.md"].split("## The tree")[1].split("```")[1]
    entries = re.split(r"\n(?=\S)", tree.strip())  # each with its continuation lines
    named = {entry.split()[0] for entry in entries}
    for entry in entries:
        name, *words = re.findall(r"[\w./]+", entry)
        assert (PROJECT / name).exists()
        missing = [word for word in words if word.endswith(".py") and not (PROJECT / name / word).exists()]
        assert not missing
    tracked = subprocess.run(["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=True)
    folders = {path.split("/")[0] + "/" for path in tracked.stdout.splitlines() if "/" in path}
    assert {folder for folder in folders if not folder.startswith(".")} <= named


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_that_the_program_prints(message):
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in printed()), message
