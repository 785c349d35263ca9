"""How minibatches are divided: nothing is left out, and a large network gets few different sizes."""

from hypothesis import given
from hypothesis import strategies as st

from vla.pass_sizes import pass_sizes, recorded_sizes


@given(count=st.integers(0, 300), largest=st.integers(1, 64), few_sizes=st.booleans())
def test_all_observations_are_divided_and_no_pass_is_too_large(count, largest, few_sizes):
    sizes = pass_sizes(count, largest, few_sizes)
    assert sum(sizes) == count
    assert all(1 <= size <= largest for size in sizes)
    if few_sizes:
        assert set(sizes) <= set(recorded_sizes(largest))
    else:
        assert sizes == [largest] * (count // largest) + [count % largest] * (count % largest > 0)


def test_a_small_card_gets_every_size_and_a_large_one_few():
    assert recorded_sizes(4) == [1, 2, 3, 4]
    assert len(recorded_sizes(31)) == 10
    # Any number of active rows in a minibatch of 64: at most four passes each.
    assert all(len(pass_sizes(count, 31, few_sizes=True)) <= 4 for count in range(65))
