"""`flatten` keeps every decision, one row each, and marks exactly the executed tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.trajectory import flatten
from tests.fakes import ACTION_DIM, CHUNK_LENGTH, NUM_TOKENS, trajectory


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, CHUNK_LENGTH)), min_size=1, max_size=6))
def test_rows_positions_and_executed_tokens_for_any_lengths(shapes):
    trajectories = [trajectory(length, last_executed=last) for length, last in shapes]
    batch = flatten(trajectories, ACTION_DIM)
    row = 0
    for index, (length, last) in enumerate(shapes):
        for t in range(length):
            executed = ACTION_DIM * (last if t == length - 1 else CHUNK_LENGTH)
            assert batch.observations[row] is trajectories[index].decisions[t].observation
            assert torch.equal(batch.tokens[row], trajectories[index].decisions[t].tokens)
            assert batch.executed[row].tolist() == [True] * executed + [False] * (NUM_TOKENS - executed)
            assert (int(batch.trajectory[row]), int(batch.steps_to_end[row])) == (index, length - 1 - t)
            row += 1
    assert row == len(batch)
    assert int(batch.executed.sum()) == ACTION_DIM * sum(t.env_steps for t in trajectories)
