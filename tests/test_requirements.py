"""What has to be installed: nothing that needs a compiler, TensorFlow or a second framework."""

import re
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
# Each has stopped installations of neighbouring projects: built from source, or pulling in old releases.
UNWANTED = {"tensorflow", "dlimp", "flash-attn", "robomimic", "egl-probe", "hf-egl-probe", "bitsandbytes", "gym"}


def lines() -> list[str]:
    files = ("requirements.txt", "requirements-simulator.txt")
    found = (line.split("#")[0].strip() for name in files for line in (PROJECT / name).read_text().splitlines())
    return [line for line in found if line]


def test_nothing_is_required_that_installs_badly_and_the_simulator_is_pinned():
    required = {re.match(r"[\w.-]+", line)[0].lower() for line in lines()}
    assert {"torch", "mujoco", "hf-libero", "robosuite"} <= required
    assert not required & UNWANTED
    assert {"mujoco==3.3.0", "robosuite==1.4.0", "hf-libero==0.1.4", "bddl==1.0.1"} <= set(lines())


def test_nothing_unwanted_is_imported():
    imported = re.compile(r"^\s*(?:import|from) (?:tensorflow|flash_attn|gym|robomimic|bitsandbytes)\b", re.MULTILINE)
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    sources = [PROJECT / name for name in listed.splitlines() if (PROJECT / name).exists()]
    assert len(sources) > 50
    assert not [path for path in sources if imported.search(path.read_text())]
