"""The model card says what is known and nothing else."""

import hashlib

import pytest

from errors import BadInput
from vla.sft_card import main, write_card, write_run

RUN = {
    "command": "python -m vla.sft --demos demos --out out",
    "arguments": {"init": None, "save_dtype": "bfloat16", "learner": {"batch_size": 256, "seed": 3}},
    "commit": "0123abc",
    "versions": {"torch": "2.6.0"},
    "device": "CPU",
    "network": {
        "parameters": 8_000_000, "vocabulary_parameters": 6_000_000, "num_images": 2, "image_size": 112,
        "image_tokens": 128, "proprio": True,
    },
    "data": {
        "train_episodes": 90, "train_frames": 2500, "held_out_episodes": 10, "instructions": ["pick up the bowl"],
        "statistics_key": "libero_spatial_no_noops",
    },
    "steps": 6000,
    "seconds": 600.0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_run(tmp_path, RUN)
    return tmp_path


def test_the_card_holds_command_data_and_the_hash_of_every_file(folder):
    card = write_card(folder).read_text()
    for file in ("model.safetensors", "sft_run.json"):
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() in card
    for fact in (RUN["command"], "0123abc", "90 episodes", "2,500 frames", "pick up the bowl", "6,000 steps", "seed 3"):
        assert fact in card
    assert "README.md" not in card  # no file can hold its own hash


def test_there_is_no_evaluation_unless_one_is_given(folder):
    assert "Evaluation" not in write_card(folder).read_text()
    assert "## Evaluation\n\n55 of 100 episodes.\n" in write_card(folder, "55 of 100 episodes.\n").read_text()


def test_the_licence_of_a_base_is_not_claimed(folder):
    write_run(folder, RUN | {"arguments": RUN["arguments"] | {"init": "someone/policy"}})
    card = write_card(folder).read_text()
    assert "`someone/policy`, whose licence" in card
    assert "project's licence" not in card


def test_the_command_line_adds_an_evaluation(folder, tmp_path, capsys):
    text = tmp_path / "results.md"
    text.write_text("7 of 10")
    main(["--checkpoint", str(folder), "--evaluation", str(text)])
    assert "README.md" in capsys.readouterr().out
    assert "7 of 10" in (folder / "README.md").read_text()


def test_a_folder_of_another_origin_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"sft_run\.json"):
        write_card(tmp_path)


def test_a_file_that_the_system_does_not_let_be_read_is_named(folder):
    (folder / "weights.bin").symlink_to("/proc/self/mem")  # a plain file by its looks; page 0 gives EIO
    with pytest.raises(BadInput, match=r"weights\.bin: cannot be read"):
        write_card(folder)
