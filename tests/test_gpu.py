"""The policy on a GPU: recorded, compiled, recomputed and 8-bit passes beside eager ones, also above a frozen trunk.

python -m pytest -m gpu
"""

from dataclasses import replace

import pytest
import torch

from configs.config import TrainConfig
from configs.sections import PhaseConfig, UpdateConfig
from probes import check_learning, check_logits_path
from rl.phases import phase_at
from rl.trajectory import flatten
from rl.update import make_learner, update
from tests.small_checkpoint import BUNDLED, load_policy, trained_policy
from tests.test_frozen_trunk import played
from vla.memory import RolloutSize, plan_update
from vla.policy import Policy
from vla.preprocessing import synthetic_observations
from vla.tokens import token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none"),
]
ROUNDED = {"rtol": 5e-2, "atol": 5e-2}
TOLERANCE = {"float32": {"rtol": 1e-3, "atol": 1e-3}, "bf16": ROUNDED, "int8": ROUNDED}
# None: all parts are trained
both_trunks = pytest.mark.parametrize("trained_blocks", [None, 2])


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch):
    """Patch embeddings in float32 would be computed with fewer digits than on a CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def observations(small):
    """Five; the prompts of the first three have other lengths than the rest."""
    plain = synthetic_observations(2, load_policy(small).statistics.proprio, count=5)
    return [replace(one, instruction="open the drawer") for one in plain[:3]] + plain[3:]


def policy_on_gpu(folder, **options) -> Policy:
    return trained_policy(
        folder, **({"device": "cuda", "frozen_weights": "float32", "compile": "auto"} | options)
    )


def test_pixel_values_have_the_same_bits_as_on_a_cpu(small, observations):
    pixels = policy_on_gpu(small).model_inputs(observations)[0]
    assert torch.equal(pixels.cpu(), load_policy(small).model_inputs(observations)[0])


def decided_and_learned(policy: Policy, observations) -> list[torch.Tensor]:
    """Logits when deciding, as student and as teacher, and logits and gradients when learning from what was kept."""
    for _, parameter in policy.named_trainable_parameters():
        parameter.grad = None
    acted = policy.act(observations)
    by_teacher = policy.act_as_teacher(observations, kept=acted.kept)
    logits = policy.chunk_logits(observations, acted.kept)
    logits.log_softmax(-1)[..., 7].mean().backward()
    gradients = [p.grad.clone() for _, p in policy.named_trainable_parameters() if p.grad is not None]
    learning = token_logprobs(logits.detach(), acted.tokens, 1.0).cpu()
    torch.testing.assert_close(learning, acted.logprobs, **TOLERANCE[policy.frozen_weights])
    return [learning, by_teacher.logprobs, *gradients]


@both_trunks
@pytest.mark.parametrize(
    ("options", "recomputes"),
    [
        ({}, False),
        ({"frozen_weights": "bf16"}, False),
        ({"frozen_weights": "int8"}, False),
        ({"l1_student": "laplace"}, False),
        ({"compile": "on"}, False),
        ({}, True),
        ({"compile": "off"}, True),
    ],
    ids=str,
)
def test_recorded_compiled_and_recomputed_passes_are_the_eager_ones(
    small, observations, trained_blocks, options, recomputes
):
    """Two batches of each of two sizes, so that every recording is made and then replayed with other numbers."""
    folder = (
        BUNDLED if options.get("frozen_weights") == "int8" else small
    )  # its products need larger matrices
    options = {"trained_blocks": trained_blocks} | options
    policy = policy_on_gpu(folder, **options)
    if recomputes:
        policy.network.recompute_everything()
    eager = policy_on_gpu(folder, **(options | {"compile": "off"}))
    for batch in (observations, observations[:2], observations[::-1], observations[1:3]):
        results = decided_and_learned(policy, batch)
        for result, expected in zip(results, decided_and_learned(eager, batch), strict=True):
            torch.testing.assert_close(result, expected, **TOLERANCE[policy.frozen_weights])


@pytest.mark.parametrize("place", ["cuda", "cpu", None])
def test_it_does_not_matter_where_states_are_kept(small, observations, place):
    policy = policy_on_gpu(small, trained_blocks=1)
    expected = decided_and_learned(policy, observations)
    policy.kept_on = None if place is None else torch.device(place)
    kept = policy.act(observations).kept
    if place is None:
        assert kept == [None] * len(observations)
    else:
        assert {states.device.type for states in kept} == {place}
        assert all(states.is_pinned() for states in kept if place == "cpu")
    for result, before in zip(decided_and_learned(policy, observations), expected, strict=True):
        torch.testing.assert_close(result, before, **TOLERANCE["float32"])


@pytest.mark.parametrize(
    "options",
    [{"frozen_weights": "bf16"}, {"frozen_weights": "int8"}, {"compile": "on"}, {"trained_blocks": 2}],
    ids=str,
)
def test_a_trial_step_brings_what_it_promises(observations, options):
    policy = load_policy(BUNDLED, device="cuda", **({"compile": "auto"} | options))
    check_logits_path(policy, observations[0], temperature=1.0)
    check_learning(policy, observations[0], micro_batch_size=4)  # raises if it brings much less or more


@both_trunks
def test_an_update_on_a_gpu_is_that_on_a_cpu(small, observations, trained_blocks):
    """Of micro-batches of two sizes, with the recorded passes' own gradient buffers."""
    phases = PhaseConfig(warmup=False)
    settings = UpdateConfig(n_epochs=2, batch_size=5, micro_batch_size=3, lr=1e-3)
    config = TrainConfig(phases=phases, update=settings)
    on_cpu = policy_on_gpu(small, device="cpu", trained_blocks=trained_blocks)
    tokens = flatten([played(on_cpu, observations)], on_cpu.action_dim).tokens
    learned = []
    for policy in (on_cpu, policy_on_gpu(small, trained_blocks=trained_blocks)):
        batch = flatten([played(policy, observations)], policy.action_dim)
        # Draws from nearly equal probabilities may differ, so both learn from the same tokens.
        logits = policy.chunk_logits(observations, batch.kept).detach()
        batch = replace(
            batch,
            tokens=tokens,
            student_logprobs=token_logprobs(logits, tokens, 1.0).cpu(),
            advantages=torch.ones(len(batch)),
        )
        metrics = update(make_learner(policy, config), batch, phase_at(0, phases), config, 0)
        assert metrics["train/optimizer_steps"] == 2
        assert metrics["train/first_ratio_error"] < 1e-3
        learned.append([p.detach().cpu() for _, p in policy.named_trainable_parameters()])
    for expected, result in zip(*learned, strict=True):
        # Adam moves a number by lr, whatever the size of its gradient, so rounding can turn a step around.
        assert ((expected - result).abs() > 1e-4).float().mean() < 0.05


@pytest.mark.parametrize(("num_decisions", "place"), [(512, "cuda"), (10**9, "cpu")])
def test_the_plan_keeps_states_on_the_gpu_as_far_as_they_fit(small, num_decisions, place):
    policy = policy_on_gpu(small, trained_blocks=1)
    rollout = RolloutSize(num_decisions, main_memory_bytes=float("inf"))
    plan = plan_update(policy, "auto", 4, rollout=rollout)
    assert plan == (4, 0)
    assert policy.kept_on.type == place
