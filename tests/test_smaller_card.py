"""The command line of benchmarks.smaller_card."""

import pytest

from benchmarks import smaller_card
from contracts import BadInput


@pytest.mark.parametrize("argv", [[], ["23.5"], ["python", "train_grpo.py"]])
def test_without_a_size_or_a_command_the_usage_is_named(argv):
    with pytest.raises(BadInput, match="smaller_card GIB COMMAND"):
        smaller_card.main(argv)
