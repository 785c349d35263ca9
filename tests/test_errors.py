"""A refusal is one line that a terminal shows as it is."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from errors import BadInput


@given(st.text())
def test_every_message_is_one_printable_line(message):
    assert str(BadInput(message)).isprintable()


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=1500))
def test_what_is_one_line_already_stays_as_it_is(message):
    assert str(BadInput(message)) == message


def test_a_long_message_keeps_both_ends():
    message = str(BadInput(f"/a/file: {'x' * 1_000_000}: do this"))
    assert message.startswith("/a/file: ")
    assert message.endswith(": do this")
    assert len(message) < 2000


def test_a_message_crosses_processes_unchanged():
    error = BadInput("a\nb")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a\\nb"
