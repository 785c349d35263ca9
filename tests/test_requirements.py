"""What has to be installed: nothing that needs a compiler, TensorFlow or a second framework."""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
# Each has stopped installations of neighbouring projects: built from source, or pulling in old releases.
UNWANTED = {"tensorflow", "dlimp", "flash-attn", "robomimic", "egl-probe", "hf-egl-probe", "bitsandbytes", "gym"}


def packages(file: str) -> set[str]:
    lines = (line.split("#")[0].strip() for line in (PROJECT / file).read_text().splitlines())
    return {re.match(r"[\w.-]+", line)[0].lower() for line in lines if line}


def test_nothing_is_required_that_installs_badly():
    required = packages("requirements.txt") | packages("requirements-simulator.txt")
    assert {"torch", "mujoco", "hf-libero", "robosuite"} <= required
    assert not required & UNWANTED


def test_the_simulators_versions_are_pinned():
    lines = {*(PROJECT / "requirements.txt").read_text().splitlines()}
    lines |= {*(PROJECT / "requirements-simulator.txt").read_text().splitlines()}
    assert {"mujoco==3.3.0", "robosuite==1.4.0", "hf-libero==0.1.4", "bddl==1.0.1"} <= lines


def test_nothing_unwanted_is_imported():
    anywhere = r"^\s*(?:import|from) (?:tensorflow|flash_attn|gym|robomimic)\b"
    by_every_run = r"^(?:import|from) bitsandbytes\b"  # for --load-in-4bit alone, and only then
    imported = re.compile(f"{anywhere}|{by_every_run}", re.MULTILINE)
    parts = [
        PROJECT.glob("*.py"),
        *((PROJECT / part).rglob("*.py") for part in ("vla", "envs", "rl", "configs", "untrusted")),
    ]
    sources = [path for part in parts for path in part]
    assert len(sources) > 50
    assert not [path for path in sources if imported.search(path.read_text())]
