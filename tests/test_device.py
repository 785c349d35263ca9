"""Which device a policy runs on."""

import pytest
import torch

from contracts import BadInput
from vla.device import LARGE_CHECKPOINT_BYTES, choose_device


@pytest.fixture
def set_gpu_count(monkeypatch):
    def set_count(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return set_count


@pytest.mark.parametrize(
    ("flag", "device"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_with_a_gpu_the_flag_decides(set_gpu_count, flag, device):
    set_gpu_count(2)
    assert choose_device(flag, "some/hub-id") == torch.device(device)


def test_every_rank_has_a_gpu_of_its_own(set_gpu_count, monkeypatch):
    set_gpu_count(2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BadInput, match="cuda:2"):
        choose_device("auto")


def test_without_a_gpu_a_small_checkpoint_runs_on_the_cpu(set_gpu_count, small):
    set_gpu_count(0)
    for checkpoint in (str(small), "checkpoints/missing"):
        assert choose_device("auto", checkpoint) == torch.device("cpu")
    with pytest.raises(BadInput, match="--device cuda"):
        choose_device("cuda", str(small))


def test_without_a_gpu_a_7b_is_refused_unless_the_cpu_is_asked_for(set_gpu_count, tmp_path):
    set_gpu_count(0)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(LARGE_CHECKPOINT_BYTES + 1)  # sparse: takes no disk
    for checkpoint in (str(tmp_path), "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"):
        with pytest.raises(BadInput, match="--device cpu"):
            choose_device("auto", checkpoint)
        assert choose_device("cpu", checkpoint).type == "cpu"
