"""The policy in checkpoints/tiny-libero-spatial is what its README says, and room is left to improve it."""

import hashlib
import re
from pathlib import Path

from envs.env import EnvSpec
from envs.libero import LiberoEnv
from vla.loading import LoadOptions
from vla.policy import Policy

FOLDER = Path(__file__).parent.parent / "checkpoints" / "tiny-libero-spatial"
MAX_BYTES = 20_000_000  # everyone who clones the repository downloads it


def test_the_files_are_those_of_the_card_and_small():
    card = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| `([0-9a-f]{64})` \|$", card, re.MULTILINE)
    paths = [path for path in FOLDER.iterdir() if path.name != "README.md"]
    contents = {path.name: path.read_bytes() for path in paths}
    assert {name: (int(size.replace(",", "")), digest) for name, size, digest in rows} == {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
    }
    assert sum(len(content) for content in contents.values()) + len(card) <= MAX_BYTES


def test_it_solves_initial_states_that_no_demonstration_began_in():
    """Greedy, three of the 15 of 50 that its card counts; on another processor rounding may decide one of them."""
    policy = Policy.load(str(FOLDER), LoadOptions(task_suite="libero_spatial"))
    env = LiberoEnv(EnvSpec("libero_spatial", (0,), num_images=1, assets="lowpoly"), 0)
    successes = 0
    for init_state in (3, 31, 46):
        result = env.reset(init_state)
        while not result.done:
            result = env.step_chunk(policy.act([result.observation]).actions[0])
        successes += result.success
    env.close()
    assert successes >= 2
