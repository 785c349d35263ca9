import pytest

from envs.libero import ChunkResult, EnvSpec, task_info
from envs.scripted import check_init_states, main, summary
from errors import BadInput

TASKS = task_info(EnvSpec("libero_spatial", (0, 1)))


def test_the_expert_succeeds_and_says_so(capsys):
    main(["--task-ids", "4", "--init-states", "15", "17"])  # the drawer, from two states that leave little room
    line = capsys.readouterr().out
    assert line.split()[:2] == ["4", "2/2"]
    assert "top drawer" in line


def test_the_summary_counts_successes_and_names_failures():
    outcomes = {
        0: ChunkResult(None, True, 50, env_steps=50, done=True),
        1: ChunkResult(None, False, 220, env_steps=220, done=True),
        2: ChunkResult(None, True, 60, env_steps=60, done=True),
    }
    line = summary(TASKS[0], outcomes)
    assert "2/3" in line
    assert "median  55 max  60" in line
    assert line.endswith("failed from 1")


@pytest.mark.parametrize(("first", "end"), [(0, 51), (-1, 3), (5, 5)])
def test_initial_states_that_do_not_exist_are_bad_input(first, end):
    with pytest.raises(BadInput, match="--init-states"):
        check_init_states(TASKS, first, end)


def test_another_suite_is_bad_input():
    with pytest.raises(BadInput, match="black bowl"):
        main(["--task-suite", "libero_object", "--task-ids", "0", "--init-states", "0", "1"])
