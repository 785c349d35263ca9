"""The network against outputs of the original openvla-oft and SimpleVLA-RL code (tests/golden/README.md).

Tolerances are the golden data's: 2 to 4 times what an independent re-computation on current libraries differs by. The
price of a mistake is far above them: the smallest one measured (an epsilon of 1e-5 in place of 1e-6) costs 1e-3.
"""

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from tests.small_checkpoint import load_small_network, network_inputs, train_network_a_little
from vla.adapters import add_lora
from vla.checkpoint import inspect_checkpoint
from vla.heads import L1RegressionHead, ProprioProjector
from vla.model import OpenVLAOFT
from vla.network_io import file_key, load_l1_head, load_network
from vla.preprocessing import ImageProcessor, pixel_values
from vla.tokens import PAD_ID

GOLDEN = Path(__file__).parent / "golden"
NUM_ACTION_TOKENS = 56
LOGITS = 2e-4
HIDDEN = 8e-5
EVALUATION_CASES = ["a_1img", "b_2img_proprio", "c_batch_1img", "d_batch_2img_proprio"]
TRAINING_CASES = ["e_train_1img", "f_train_2img_proprio"]


@pytest.fixture(scope="module")
def networks() -> dict[bool, OpenVLAOFT]:
    """By whether it has the checkpoint's proprio projector: half of the cases use none."""
    info = inspect_checkpoint(GOLDEN / "checkpoint")
    networks = {
        uses_proprio: load_network(info, NUM_ACTION_TOKENS, torch.device("cpu"), torch.float32)
        for uses_proprio in (True, False)
    }
    networks[False].proprio_projector = None
    return networks


@pytest.fixture(scope="module")
def action_head() -> L1RegressionHead:
    return load_l1_head(inspect_checkpoint(GOLDEN / "checkpoint"), torch.device("cpu"), torch.float32)


class Case:
    """One golden file, and our network's inputs for it."""

    def __init__(self, name: str):
        self.arrays = np.load(GOLDEN / f"case_{name}.npz")
        self.uses_proprio = name.endswith("proprio")
        processor = ImageProcessor.load(GOLDEN / "checkpoint")
        images = torch.from_numpy(np.array([[_model_input(i) for i in row] for row in self["image_index"]]))
        prompts, lengths = self._prompts()
        is_padded = len(set(lengths)) > 1
        self.inputs = (
            pixel_values(images, *processor.normalisation(images.device)),
            prompts,
            torch.tensor(lengths) if is_padded else None,
            self._proprio(),
        )

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    def _prompts(self) -> tuple[torch.Tensor, list[int]]:
        ids = self["input_ids_right" if "lengths" in self.arrays else "input_ids"]
        if "lengths" in self.arrays:
            lengths = self["lengths"].tolist()
        elif "labels" in self.arrays:  # training: the action ids that follow the prompt are left out
            lengths = [int((row != -100).argmax()) for row in self["labels"]]
        else:
            lengths = [ids.shape[1]]
        is_prompt = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
        ids = np.where(is_prompt, ids, PAD_ID)
        return torch.from_numpy(ids[:, : max(lengths)]), lengths

    def _proprio(self) -> torch.Tensor | None:
        if not self.uses_proprio:
            return None
        return torch.from_numpy(np.atleast_2d(self["proprio_normalized"])).float()


def _model_input(index: int) -> np.ndarray:
    return np.array(Image.open(GOLDEN / "images" / f"model_input_{index}.png"))


@pytest.fixture(scope="module", params=EVALUATION_CASES + TRAINING_CASES)
def case_and_outputs(request, networks):
    case = Case(request.param)
    with torch.no_grad():
        logits, hidden = networks[case.uses_proprio](*case.inputs)
    return case, networks[case.uses_proprio], logits, hidden


def _assert_close(ours, golden: np.ndarray, tolerance: float) -> None:
    difference = np.abs(np.asarray(ours, dtype=np.float64) - golden).max()
    assert difference <= tolerance, f"largest difference {difference:.2e}, tolerance {tolerance:.0e}"


def test_logits_and_hidden_states_are_the_references(case_and_outputs):
    case, network, logits, hidden = case_and_outputs
    _assert_close(hidden, case["action_hidden_states"], HIDDEN)
    _assert_close(logits, case["logits_31744_32000"], LOGITS)
    assert np.array_equal(logits.argmax(-1) + 31744, case["greedy_last256"])
    with torch.no_grad():
        all_logits = network.language_model.lm_head(hidden).float()
    assert np.array_equal(all_logits.argmax(-1), case["greedy_full_vocab"])
    _assert_close(all_logits.logsumexp(-1), case["logsumexp_full_vocab"], LOGITS)


def test_l1_head_is_the_references(case_and_outputs, action_head):
    case, _, _, hidden = case_and_outputs
    golden = case["predicted_actions_l1" if "labels" in case.arrays else "normalized_actions_l1"]
    with torch.no_grad():
        _assert_close(action_head(hidden), golden.reshape(-1, 8, 7), LOGITS)


def _cross_entropy(network: OpenVLAOFT, case: Case) -> torch.Tensor:
    """The reference's: mean over 56 action tokens and </s> of each row, over the whole vocabulary."""
    embeddings, lengths = network.embed(*case.inputs)
    positions = network.output_positions(embeddings, lengths)
    positions = torch.cat([positions, positions[:, -1:] + 1], dim=1)  # the last zero vector predicts </s>
    hidden = network.language_model.model.norm(network.run_layers(embeddings, lengths, positions))
    targets = torch.from_numpy(case["labels"])
    targets = targets[targets != -100].view(len(targets), NUM_ACTION_TOKENS + 1)
    return F.cross_entropy(network.language_model.lm_head(hidden).float().flatten(0, 1), targets.flatten())


@contextmanager
def _trainable(*modules: torch.nn.Module):
    for module in modules:
        module.requires_grad_(True)
    yield
    for module in modules:
        module.zero_grad(set_to_none=True)
        module.requires_grad_(False)


@pytest.mark.parametrize("name", TRAINING_CASES)
@pytest.mark.parametrize("kind", ["ce", "l1"])
def test_both_losses_of_supervised_training_and_their_gradients_are_the_references(
    name, kind, networks, action_head
):
    case = Case(name)
    network = networks[case.uses_proprio]
    golden = json.loads((GOLDEN / f"case_{name}_grad_norms.json").read_text())
    with _trainable(network, action_head):
        if kind == "ce":
            loss = _cross_entropy(network, case)
        else:
            loss = F.l1_loss(action_head(network(*case.inputs)[1]), torch.from_numpy(case["actions"]))
        loss.backward()
        ours = {file_key(key): parameter.grad for key, parameter in network.named_parameters()}
        ours |= {f"action_head.{key}": parameter.grad for key, parameter in action_head.named_parameters()}
    assert loss.item() == pytest.approx(float(case[f"loss_{kind}"]), abs=1e-4)
    for key, norm in golden[f"{kind}_loss"].items():
        assert ours[key].norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-6), key
    if kind == "ce":
        assert all(ours.get(key) is None for key in golden["no_grad_ce"])
        for key in (key for key in case.arrays if key.startswith("grad_ce__")):
            _assert_close(ours[key.removeprefix("grad_ce__")], case[key], 1e-4 * np.abs(case[key]).max())


def test_compiled_and_recomputed_blocks_have_the_same_outputs_and_gradients(small_one_image, monkeypatch):
    network = load_small_network(small_one_image)
    network.adapters = add_lora(network, rank=4, alpha=4, dtype=torch.float32)
    train_network_a_little(network)
    inputs = network_inputs()

    def outputs() -> list[torch.Tensor]:
        network.zero_grad()
        logits, hidden = network(*inputs)
        logits.logsumexp(-1).sum().backward()
        with torch.no_grad(), network.adapters.disabled():
            teachers_logits = network(*inputs)[0]
        gradients = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        return [logits, hidden, teachers_logits, *gradients]

    eager = outputs()
    network.recomputed_blocks = network.num_blocks
    assert all(map(torch.equal, outputs(), eager))
    # Traced as for a GPU, but run without generating code, which takes a minute on a CPU.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    network.compile_blocks()
    torch.testing.assert_close(outputs(), eager)
    network.recomputed_blocks = 0
    torch.testing.assert_close(outputs(), eager)


def test_full_size_heads_have_the_published_parameters():
    with torch.device("meta"):
        projector = ProprioProjector(8, 4096)
        head = L1RegressionHead(2, 4096, 4096, 7)
    assert sum(p.numel() for p in projector.parameters()) == 16_818_176
    assert sum(p.numel() for p in head.parameters()) == 151_117_831
