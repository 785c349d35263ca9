"""README and docs/ promise nothing that is not there: flags, commands, files, links."""

import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest

from benchmarks.collect import Args as CollectArgs
from command_line import parse_flags
from configs.cli import parse_eval, parse_train
from vla.merge import MergeArgs
from workshop.demos import DemosArgs
from workshop.sft_config import SftArgs

PROJECT = Path(__file__).resolve().parents[1]
PAGES = {page.name: page.read_text() for page in (PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"))}
NOW = {name: text for name, text in PAGES.items() if name != "LOG.md"}  # the log speaks of what is gone, too
FLAGS_OF_TORCHRUN = {"nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port"}
FLAGS_OF_PIP_DOCKER_AND_THE_HUB = {"require_hashes", "ipc", "repo_type", "local_dir"}
READERS = {
    "benchmarks.collect": partial(parse_flags, CollectArgs, prog="benchmarks.collect"),
    "train_grpo.py": parse_train,
    "eval.py": parse_eval,
    "vla.merge": partial(parse_flags, MergeArgs, prog="vla.merge"),
    "workshop.demos": partial(parse_flags, DemosArgs, prog="workshop.demos"),
    "workshop.sft": partial(parse_flags, SftArgs, prog="workshop.sft"),
}


def words_of_the_code() -> set[str]:
    """Among them the fields of all settings, which are the flags."""
    tracked = subprocess.check_output(["git", "ls-files", "*.py", ":!tests"], cwd=PROJECT, text=True)
    paths = [PROJECT / name for name in tracked.split()]
    return {word for path in paths if path.exists() for word in re.findall(r"\w+", path.read_text())}


@pytest.mark.parametrize("page", NOW)
def test_every_flag_exists(page):
    flags = {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-z][a-z0-9_-]+)", NOW[page])}
    unknown = flags - FLAGS_OF_TORCHRUN - FLAGS_OF_PIP_DOCKER_AND_THE_HUB
    assert {flag.removeprefix("no_") for flag in unknown} <= words_of_the_code()


@pytest.mark.parametrize("page", NOW)
def test_every_command_of_a_block_has_flags_of_its_program(page):
    for block in re.findall(r"```bash\n(.*?)```", NOW[page], re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["python"] and "--resume" not in words:  # that reads the run's folder
                program, *flags = [word for word in words[1:] if word != "-m"]
                READERS[program](flags)


@pytest.mark.parametrize("page", NOW)
def test_every_module_and_file_exists(page):
    folders = "benchmarks|configs|docs|envs|experiment|rl|scripts|tests|vla|workshop"
    modules = set(re.findall(rf"python -m ((?:{folders})[\w.]*)", NOW[page]))
    paths = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w/.-]+\.(?:py|md|sh|yaml|png)", NOW[page]))
    for module in modules:
        path = PROJECT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    assert [path for path in sorted(paths) if not (PROJECT / path).exists()] == []


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    folder = PROJECT if page == "README.md" else PROJECT / "docs"
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        assert (folder / path).exists(), target
        assert not anchor or anchor in anchors(PAGES[Path(path).name or page]), target


def test_readmes_python_runs_as_it_stands(monkeypatch):
    monkeypatch.chdir(PROJECT)
    (example,) = re.findall(r"```python\n(.*?)```", PAGES["README.md"], flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    assert names["actions"].shape == (1, 8, 7)
