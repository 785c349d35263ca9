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
OF_OTHERS = {"--upgrade", "--numprocesses"}


@cache
def sources() -> list[ast.Module]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
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
    named = {flag for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", NOW[page]) if "_" not in flag} - OF_OTHERS
    known = flags_of_the_program()
    sections = {flag for flag in named if f"{flag}." in NOW[page]}  # --size.llm-dim
    unknown = {flag for flag in named - sections if flag not in known and flag.replace("--no-", "--") not in known}
    assert not unknown


@pytest.mark.parametrize("page", NOW)
def test_every_test_module_and_file_exists(page):
    for path, name in set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", NOW[page])):
        functions = {n.name for n in ast.parse((PROJECT / path).read_text()).body if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"
    for module in set(re.findall(r"python -m ((?:benchmarks|envs|rl|vla|workshop)[\w.]*)", NOW[page])):
        path = PROJECT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    folders = "benchmarks|configs|docs|envs|rl|scripts|tests|vla|workshop"
    for path in set(re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]+\.(?:py|md|sh|yaml|png)", NOW[page])):
        assert (PROJECT / path).exists(), path


def test_the_tree_of_the_readme_is_the_tree():
    tree = PAGES["README.md"].split("## The tree")[1]
    folder = ""
    for line in tree.splitlines():
        if re.match(r"\w+/ ", line):
            folder = line.split("/")[0]
        for name in re.findall(r"\b\w+\.py\b", line):
            inside = folder if line.startswith("  ") or folder in line.split()[0] else ""
            assert (PROJECT / inside / name).exists(), f"{inside}/{name}"


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_that_the_program_prints(message):
    parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    assert any(pattern.search(text) for text in printed()), message
