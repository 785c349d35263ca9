"""Which device a policy runs on, and how much of its memory a budget is."""

from types import SimpleNamespace

import pytest
import torch

from contracts import GIB, BadInput
from vla.device import LARGE_CHECKPOINT_BYTES, choose_device, limit_memory


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


def test_without_a_gpu_a_7b_is_refused_unless_the_cpu_is_asked_for(set_gpu_count, tmp_path):
    set_gpu_count(0)
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(LARGE_CHECKPOINT_BYTES + 1)  # sparse: takes no disk
    for checkpoint in (str(tmp_path), "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"):
        with pytest.raises(BadInput, match="--device cpu"):
            choose_device("auto", checkpoint)
        assert choose_device("cpu", checkpoint).type == "cpu"


@pytest.fixture
def limit_on_gpu(monkeypatch):
    """Apply a budget on a GPU that reports `total_gib`; returns the share of it that tensors may take."""

    def apply(total_gib, budget_gib):
        fractions = []
        properties = SimpleNamespace(total_memory=int(total_gib * GIB))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda fraction, _: fractions.append(fraction)
        )
        limit_memory(budget_gib, torch.device("cuda", 0))
        (fraction,) = fractions
        return fraction

    return apply


@pytest.mark.parametrize(
    ("reported_gib", "sold_as"),
    [(23.6, 24), (44.4, 48), (14.56, 16)],
)
def test_a_budget_of_a_cards_size_is_all_of_the_card(limit_on_gpu, reported_gib, sold_as):
    assert limit_on_gpu(reported_gib, sold_as) == 1.0


@pytest.mark.parametrize(("reported_gib", "next_size"), [(10.75, 12), (23.6, 32)])
def test_a_budget_of_the_next_larger_card_is_refused(limit_on_gpu, reported_gib, next_size):
    with pytest.raises(BadInput, match=f"--memory-budget {next_size}: cuda:0 has {reported_gib:.1f} GiB"):
        limit_on_gpu(reported_gib, next_size)
