"""The policy through its only door: what acting and learning see of it, the teacher, saving, and its device."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from contracts import BadInput, Observation
from tests.llama_like import llama_like_tokenizer
from tests.small_checkpoint import make_small_checkpoint
from vla.device import LARGE_CHECKPOINT_BYTES, choose_device
from vla.loading import LoadOptions
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from vla.tokens import decode, to_env

BUNDLED = Path(__file__).resolve().parent.parent / "checkpoints" / "tiny-libero-spatial"
GOLDEN = Path(__file__).parent / "golden"
SUITE = "libero_spatial"
SHORT, LONG = (
    "turn on the stove",
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
)


def _load(folder, **options) -> Policy:
    return Policy.load(str(folder), LoadOptions(task_suite=SUITE, device="cpu", lora_rank=4, **options))


@pytest.fixture
def policy(small):
    return _load(small)


@pytest.fixture(scope="module")
def observations(small) -> list[Observation]:
    """Of different instructions, so that the batch is padded."""
    plain = synthetic_observations(2, _load(small).statistics.proprio, count=4)
    texts = (SHORT, LONG, SHORT, "open the drawer")
    return [replace(observation, instruction=text) for observation, text in zip(plain, texts, strict=True)]


def _train_a_little(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(1)
    for _, parameter in policy.named_trainable_parameters():
        with torch.no_grad():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", ["a_1img", "b_2img_proprio", "c_batch_1img", "d_batch_2img_proprio"])
def test_decisions_are_the_references_from_observations_to_actions(name, tmp_path):
    """Of openvla-oft and SimpleVLA-RL (tests/golden/README.md), by the tolerances of tests/test_model.py."""
    case, uses_proprio = np.load(GOLDEN / f"case_{name}.npz"), name.endswith("proprio")
    unused = shutil.ignore_patterns() if uses_proprio else shutil.ignore_patterns("proprio_projector*")
    folder = shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint", ignore=unused)
    llama_like_tokenizer().save(str(folder / "tokenizer.json"))
    policy, count = (
        Policy.load(str(folder), LoadOptions(task_suite=SUITE, device="cpu")),
        len(case["image_index"]),
    )
    images = [
        [Image.open(GOLDEN / "images" / f"model_input_{i}.png") for i in row] for row in case["image_index"]
    ]
    states = np.atleast_2d(case["proprio_raw"]) if uses_proprio else np.zeros((count, 8))
    tasks = np.atleast_1d(case["tasks" if "tasks" in case else "task"])
    rows = zip(map(np.stack, images), states, map(str, tasks), [True] * count, strict=True)
    observations, temperature = [Observation(*row) for row in rows], float(case.get("temperature", 1.0))

    logits = policy.chunk_logits(observations).detach().numpy()
    np.testing.assert_allclose(logits, case["logits_31744_32000"], rtol=0, atol=2e-4)
    acted = policy.act(observations, "greedy", temperature)
    np.testing.assert_array_equal(acted.tokens, case["greedy_last256"])
    if "responses" in case:
        np.testing.assert_array_equal(acted.actions, to_env(case["actions"]))
        np.testing.assert_allclose(acted.logprobs, case["logp_greedy"], rtol=0, atol=8e-5)
    chunk = case["normalized_actions_l1"].reshape(count, 56)
    rounded = decode(policy.act(observations, "l1").tokens)
    assert np.abs(rounded - np.clip(chunk, -1, 1)).max() <= 1 / 255 + 2e-4  # half a bin


@pytest.mark.parametrize("fused", [False, True])
def test_after_an_optimizer_step_the_policy_is_that_of_its_new_parameters(policy, small, observations, fused):
    """Fused optimizers write to parameters behind autograd's back; layers keep copies of their adapters."""
    optimizer = torch.optim.AdamW([p for _, p in policy.named_trainable_parameters()], lr=1e-2, fused=fused)
    policy.watch(optimizer)
    policy.chunk_logits(observations).log_softmax(-1)[..., 7].mean().backward()
    before = policy.chunk_logits(observations)
    optimizer.step()
    fresh = _load(small)
    with torch.no_grad():
        for (_, new), (_, trained) in zip(
            fresh.named_trainable_parameters(), policy.named_trainable_parameters(), strict=True
        ):
            new.copy_(trained)
    after = policy.chunk_logits(observations)
    assert torch.equal(after, fresh.chunk_logits(observations))
    assert (after - before).abs().max() > 0.01


def test_a_small_step_arrives_in_bfloat16():
    """Where adapters are added to rounded outputs, as peft adds them, this share is 0.03 to 0.25."""
    policy = Policy.load(str(BUNDLED), LoadOptions(task_suite=SUITE, device="cpu", frozen_weights="bf16"))
    exact = Policy.load(str(BUNDLED), LoadOptions(task_suite=SUITE, device="cpu", frozen_weights="float32"))
    seen = synthetic_observations(policy.num_images, policy.statistics.proprio, 8)
    moved = []
    for one in (exact, policy):
        before = one.chunk_logits(seen).detach()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in one.named_trainable_parameters():
                if name.endswith("lora_B"):
                    parameter += 2e-4 * torch.randn(parameter.shape, generator=generator).sign()
        moved.append((one.chunk_logits(seen).detach() - before).flatten())
    share = (moved[0] @ moved[1] / moved[0].square().sum()).item()
    assert 0.5 < share < 1.5


def _generators(count: int, seed: int = 0):
    return [torch.Generator().manual_seed(seed + i) for i in range(count)]


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("mode", ["greedy", "sample", "l1"])
def test_learning_reproduces_the_log_probabilities_of_sampling(policy, observations, mode, temperature):
    acted = policy.act(observations, mode, temperature, _generators(4))
    again = policy.token_logprobs(policy.chunk_logits(observations), acted.tokens, temperature)
    assert torch.equal(again.detach(), acted.logprobs)


def test_a_policy_whose_logits_are_no_numbers_does_not_act(policy, observations):
    _, parameter = policy.named_trainable_parameters()[-1]
    with torch.no_grad():
        parameter[:] = torch.nan
    for mode in ("greedy", "sample"):
        with pytest.raises(BadInput, match="logits are not finite"):
            policy.act(observations[:1], mode, 1.0, _generators(1))


def test_images_prepared_elsewhere_give_the_same_bits(policy, observations):
    elsewhere = [replace(o, images=policy.prepare(o.images), prepared=True) for o in observations]
    assert elsewhere[0].images.shape != observations[0].images.shape
    assert torch.equal(policy.chunk_logits(elsewhere), policy.chunk_logits(observations))


# Teacher


def test_teacher_never_changes(small, observations):
    pretrained = _load(small)
    before = pretrained.chunk_logits(observations).detach()
    assert pretrained.equals_teacher()
    for _ in range(2):
        _train_a_little(pretrained)
        assert not pretrained.equals_teacher()
        assert not torch.equal(pretrained.chunk_logits(observations), before)
        with torch.no_grad(), pretrained.teacher():
            assert torch.equal(pretrained.chunk_logits(observations), before)
            with pretrained.teacher():
                assert torch.equal(pretrained.chunk_logits(observations), before)
            assert torch.equal(pretrained.chunk_logits(observations), before)


def test_teacher_between_forward_and_backward_leaves_the_gradient(policy, observations):
    """A KL term to the teacher is computed while the student's graph is alive."""
    gradients = []
    for use_teacher in (False, True):
        logits = policy.chunk_logits(observations)
        if use_teacher:
            with torch.no_grad(), policy.teacher():
                policy.chunk_logits(observations)
        logits.square().sum().backward()
        gradients.append([p.grad for _, p in policy.named_trainable_parameters()])
        for _, parameter in policy.named_trainable_parameters():
            parameter.grad = None
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_trained_adapter_of_the_same_base_teaches_on_the_same_weights(
    small, policy, observations, tmp_path
):
    trained = _load(small, seed=7)
    _train_a_little(trained)
    trained.save_adapter(tmp_path / "adapter")
    expected = trained.chunk_logits(observations).detach()
    untrained = _load(small)
    assert untrained.use_teacher_adapter(str(tmp_path / "adapter"))
    assert not untrained.equals_teacher()
    _train_a_little(policy)
    _train_a_little(policy)
    student = policy.chunk_logits(observations).detach()
    assert policy.use_teacher_adapter(str(tmp_path / "adapter"))
    for _ in range(2):
        assert torch.equal(policy.chunk_logits(observations), student)
        with policy.teacher() as teacher, policy.teacher():
            assert teacher is policy
            assert torch.equal(policy.chunk_logits(observations), expected)
    policy.chunk_logits(observations).square().mean().backward()
    optimizer = torch.optim.AdamW([p for _, p in policy.named_trainable_parameters()], lr=1e-2)
    policy.watch(optimizer)
    optimizer.step()
    assert not torch.equal(policy.chunk_logits(observations), student)
    assert torch.equal(policy.act_as_teacher(observations).tokens, trained.act(observations).tokens)


def test_an_adapter_of_another_base_or_rank_is_no_teacher_on_these_weights(small, observations, tmp_path):
    other = make_small_checkpoint(tmp_path / "other", l1_head=True, seed=5)
    for name, trained in (
        ("base", _load(other)),
        ("rank", Policy.load(str(small), LoadOptions(task_suite=SUITE, device="cpu", lora_rank=2))),
    ):
        _train_a_little(trained)
        trained.save_adapter(tmp_path / name)
        student = _load(small)
        before = student.chunk_logits(observations).detach()
        assert not student.use_teacher_adapter(str(tmp_path / name))
        student.use_teacher(_load(tmp_path / name))
        assert torch.equal(student.act_as_teacher(observations).tokens, trained.act(observations).tokens)
        assert torch.equal(student.chunk_logits(observations), before)


def test_another_checkpoints_actions_become_the_students_nearest_tokens(policy, observations, tmp_path):
    """Its statistics are its own: the same token means another action."""
    teacher = _load(make_small_checkpoint(tmp_path / "other", seed=5))
    action = teacher.statistics.action
    teacher.statistics = replace(
        teacher.statistics,
        action=replace(action, q01=0.5 * action.q01, q99=np.where(action.mask, 0.5 * action.q99, 1)),
    )
    policy.use_teacher(teacher)
    for mode in ("greedy", "sample"):
        torch.manual_seed(0)
        taught = policy.act_as_teacher(observations, mode)
        torch.manual_seed(0)
        wanted = teacher.act(observations, mode)
        assert not torch.equal(taught.tokens, wanted.tokens)
        bin_width = (policy.statistics.action.q99 - policy.statistics.action.q01) / 255
        assert (np.abs(taught.actions - wanted.actions) <= bin_width * (1 + 1e-6)).all()
        np.testing.assert_array_equal(taught.actions, policy.actions(taught.tokens.numpy()))


# Training


def test_only_adapters_and_proprio_projector_learn(policy, observations):
    names = [name for name, _ in policy.named_trainable_parameters()]
    assert all(".lora_" in name or name.startswith("proprio_projector.") for name in names)
    assert sum(name.startswith("proprio_projector.") for name in names) == 4
    assert {parameter.dtype for _, parameter in policy.named_trainable_parameters()} == {torch.float32}
    assert names == [name for name, parameter in policy.network.named_parameters() if parameter.requires_grad]
    assert not any(module.training for module in policy.network.modules())
    policy.chunk_logits(observations).square().sum().backward()
    assert all(
        parameter.grad is None for parameter in policy.network.parameters() if not parameter.requires_grad
    )
    assert dict(policy.named_trainable_parameters())["proprio_projector.fc1.weight"].grad.abs().max() > 0


# Saving


def test_saved_adapter_gives_the_same_policy(small, policy, observations, tmp_path):
    _train_a_little(policy)
    policy.save_adapter(tmp_path / "adapter")
    expected = policy.chunk_logits(observations).detach()
    on_its_base = _load(small, adapter=str(tmp_path / "adapter"), seed=7)
    by_itself = Policy.load(str(tmp_path / "adapter"), LoadOptions(task_suite=SUITE))
    resumed = _load(small, seed=7)
    resumed.load_adapter(tmp_path / "adapter")
    for other in (on_its_base, by_itself, resumed):
        assert torch.equal(other.chunk_logits(observations), expected)
        with other.teacher(), policy.teacher():
            assert torch.equal(other.chunk_logits(observations), policy.chunk_logits(observations))


# Memory, device, precision


def test_a_gpu_too_small_for_the_weights_is_one_line(small, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore lines")

    monkeypatch.setattr("vla.loading.load_network", full)
    with pytest.raises(
        BadInput, match=r"^out of GPU memory while loading .* \(CUDA .* 2 GiB\.\): close other [^\n]*$"
    ):
        _load(small)


@pytest.fixture
def gpus(monkeypatch):
    def visible(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return visible


def test_with_a_gpu_the_flag_decides_and_every_rank_has_its_own(gpus, monkeypatch):
    gpus(2)
    for wanted, device in (("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")):
        assert choose_device(wanted, "some/hub-id") == torch.device(device)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BadInput, match="there is no cuda:2, torch sees 2 CUDA GPUs"):
        choose_device("auto")


def test_without_a_gpu_a_small_checkpoint_runs_on_the_cpu_and_a_7b_is_refused_unless_forced(
    gpus, small, tmp_path
):
    gpus(0)
    assert (
        choose_device("auto", str(small))
        == choose_device("auto", "checkpoints/missing")
        == torch.device("cpu")
    )
    with pytest.raises(BadInput, match="--device cuda: there is no cuda:0"):
        choose_device("cuda", str(small))
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(LARGE_CHECKPOINT_BYTES + 1)  # sparse: takes no disk
    for checkpoint in (str(tmp_path), "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"):
        with pytest.raises(BadInput, match=r"needs a CUDA GPU of 24 GB.*--device cpu"):
            choose_device("auto", checkpoint)
        assert choose_device("cpu", checkpoint).type == "cpu"
