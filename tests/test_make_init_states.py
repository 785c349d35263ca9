"""Initial states of a task of one's own, in the real simulator: a copy of one of LIBERO's tasks with a wider region."""

import numpy as np
import pytest
import torch

from contracts import BadInput
from envs.env import EnvSpec
from envs.pool import task_info
from envs.tasks import libero_root, load_init_states
from workshop.make_init_states import make_init_states

NAME = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
OFFICIAL = libero_root() / "bddl_files" / "libero_spatial" / f"{NAME}.bddl"


def write_task(folder, replacements=()):
    """A copy of LIBERO's file with a wider region for the bowl, and pairs of (old text, new text) replaced."""
    path = folder / "own.bddl"
    text = OFFICIAL.read_text()
    for old, new in [("(-0.06 0.19 -0.04 0.21)", "(-0.12 0.10 0.00 0.22)"), *replacements]:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = write_task(tmp_path_factory.mktemp("own"))
    return path, make_init_states(path, 4)


def test_the_file_is_found_beside_the_bddl_and_read_by_our_loader_and_by_torch(made):
    path, report = made
    stored = path.with_suffix(".pruned_init")
    states = load_init_states(stored)
    official = load_init_states(libero_root() / "init_files" / "libero_spatial" / f"{NAME}.pruned_init")
    assert states.shape == (4, official.shape[1])
    np.testing.assert_array_equal(torch.load(stored, weights_only=False), states)
    assert "4 initial states" in report
    (info,) = task_info(EnvSpec("libero_spatial", (0,), bddl_file=str(path)))
    assert info.num_init_states == 4


def test_an_existing_file_and_liberos_own_are_not_overwritten(made):
    path, _ = made
    before = path.with_suffix(".pruned_init").read_bytes()
    with pytest.raises(BadInput, match=r"own\.pruned_init exists"):
        make_init_states(path, 1)
    assert path.with_suffix(".pruned_init").read_bytes() == before
    with pytest.raises(BadInput, match="LIBERO's own"):
        make_init_states(OFFICIAL, 1)


def test_a_task_that_is_solved_from_the_start_is_refused_with_the_count(tmp_path):
    on_table = "(On akita_black_bowl_1 main_table_between_plate_ramekin_region)"
    path = write_task(tmp_path, [(on_table, "(On akita_black_bowl_1 plate_1)")])
    with pytest.raises(BadInput, match=r"only 0 of 10 placements .* 10 x already solved"):
        make_init_states(path, 1)
    assert not path.with_suffix(".pruned_init").exists()
