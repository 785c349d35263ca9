"""Which device a policy runs on, and how much of its memory a budget is."""

from types import SimpleNamespace

import pytest
import torch

from contracts import GIB, BadInput
from vla.device import LARGE_CHECKPOINT_BYTES, choose_device, limit_memory


@pytest.fixture
def set_gpu_count(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def set_count(count: int, usable: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable and count > 0)

    return set_count


def test_every_rank_has_a_gpu_of_its_own(set_gpu_count, monkeypatch):
    set_gpu_count(2)
    assert choose_device("cuda") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BadInput, match="cuda:2"):
        choose_device("auto")


def test_without_a_gpu_a_7b_is_refused_unless_the_cpu_is_asked_for(set_gpu_count, tmp_path):
    set_gpu_count(0)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(LARGE_CHECKPOINT_BYTES + 1)  # sparse: takes no disk
    for checkpoint in (str(tmp_path), "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"):
        with pytest.raises(BadInput, match="--device cpu"):
            choose_device("auto", checkpoint)
        assert choose_device("cpu", checkpoint).type == "cpu"


def test_a_gpu_whose_driver_is_too_old_is_named_unless_the_cpu_is_asked_for(set_gpu_count):
    set_gpu_count(1, usable=False)
    for name in ("auto", "cuda", "cuda:0"):
        with pytest.raises(BadInput, match="cannot use the GPU that is here"):
            choose_device(name)
    assert choose_device("cpu").type == "cpu"


def test_a_mistyped_folder_is_not_called_a_7b(set_gpu_count, tmp_path, monkeypatch):
    set_gpu_count(0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(BadInput, match="checkpoints/mien: no such folder"):
        choose_device("auto", "checkpoints/mien")


@pytest.mark.parametrize(
    ("reported_gib", "budget_gib", "share"),
    [(23.6, 24, 1.0), (14.56, 16, 1.0), (24.0, 6, 0.25), (10.75, 12, None), (23.6, 32, None)],
)
def test_a_budget_of_a_cards_size_is_all_of_the_card_and_that_of_a_larger_card_is_refused(
    monkeypatch, reported_gib, budget_gib, share
):
    shares = []
    properties = SimpleNamespace(total_memory=int(reported_gib * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    device = torch.device("cuda", 0)
    if share is None:
        with pytest.raises(BadInput, match=f"--memory-budget {budget_gib}"):
            limit_memory(budget_gib, device)
    else:
        limit_memory(budget_gib, device)
        assert shares == [share]
