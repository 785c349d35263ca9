"""Against the original image chain, processor and tokenizer (tests/golden), and invariances of the batch."""

import ctypes
import json
import platform
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from contracts import BadInput
from tests.llama_like import llama_like_tokenizer
from vla import images
from vla.images import centre_crop, jpeg_round_trip, lanczos_resize, lanczos_weights, model_input_images
from vla.preprocessing import ImageProcessor, normalised_levels, pixel_values, pixel_values_on_device
from vla.prompts import load_tokenizer, prompt, prompt_ids
from vla.tokens import BOS_ID, EMPTY_TOKEN_ID, EOS_ID, PAD_ID

GOLDEN = Path(__file__).parent / "golden"


def read(name: str) -> np.ndarray:
    return np.asarray(Image.open(GOLDEN / "images" / name).convert("RGB"))


def smooth_frames(*leading: int) -> np.ndarray:
    """uint8 (*leading, 256, 256, 3): coarse random colours, enlarged, so that JPEG behaves as with real frames."""
    coarse = np.random.default_rng(0).integers(0, 256, (*leading, 16, 16, 3), dtype=np.uint8)
    return coarse.repeat(16, axis=-3).repeat(16, axis=-2)


def preprocess(frames: np.ndarray, processor: ImageProcessor) -> np.ndarray:
    return pixel_values(model_input_images(frames, processor.image_size), processor)


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "preprocess.npz"))


@pytest.fixture(scope="module")
def processor():
    return ImageProcessor.load(GOLDEN / "checkpoint")


def load_config(folder: Path, **changes) -> ImageProcessor:
    config = json.loads((GOLDEN / "checkpoint" / "preprocessor_config.json").read_text()) | changes
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return ImageProcessor.load(folder)


def test_jpeg_round_trip_resize_and_crop_equal_tensorflow():
    frame, jpeg, model_input = (
        read(f"{name}.png") for name in ("prep_0_a_raw_256", "prep_0_b_after_jpeg_256", "model_input_0")
    )
    resized = read("prep_0_c_resized_224.png").transpose(2, 0, 1)
    np.testing.assert_array_equal(jpeg_round_trip(frame), jpeg)
    np.testing.assert_array_equal(lanczos_resize(jpeg.transpose(2, 0, 1), 224), resized)
    np.testing.assert_array_equal(centre_crop(resized), model_input.transpose(2, 0, 1))
    np.testing.assert_array_equal(model_input_images(frame, 224), model_input)


def test_pixel_values_equal_reference(golden, processor):
    stride = golden["stride"]
    pixels = pixel_values(golden["noise_image"][None], processor)
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels[None, :, ::stride, ::stride], golden["noise_pixel_values"])


def test_pixel_values_of_the_golden_images_equal_reference(golden, processor):
    stride = golden["stride"]
    pixels = pixel_values(np.stack([read(f"model_input_{i}.png") for i in range(4)]), processor)
    np.testing.assert_array_equal(pixels[None, :6, ::stride, ::stride], golden["model_input_0_pixel_values"])
    sums = pixels.astype(np.float64).sum(axis=(1, 2)).reshape(4, 6)
    np.testing.assert_allclose(sums, golden["model_input_pixel_values_sum"], rtol=1e-12)


def test_a_batch_equals_its_frames_one_by_one(processor):
    frames = smooth_frames(3, 2)  # three observations of two images
    batch = preprocess(frames, processor)
    assert batch.shape == (3, 12, 224, 224)
    for observation in range(3):
        np.testing.assert_array_equal(preprocess(frames[observation], processor), batch[observation])
        for image in range(2):
            single = preprocess(frames[observation, image : image + 1], processor)
            np.testing.assert_array_equal(single, batch[observation, 6 * image : 6 * image + 6])


def test_config_of_the_golden_checkpoint_and_of_one_without_rounded_statistics(processor, golden, tmp_path):
    assert processor.image_size == 224
    np.testing.assert_array_equal(processor.means, golden["means"])
    np.testing.assert_array_equal(processor.stds, golden["stds"])
    assert load_config(tmp_path, tvf_normalize_params=None).means[0] == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_sizes", [[3, 224, 224], [3, 384, 384]]),
        ("tvf_normalize_params", [{"mean": [0.5] * 3, "std": [0.5] * 3}]),
    ],
)
def test_a_broken_or_unsupported_config_is_refused_naming_the_file(tmp_path, field, value):
    with pytest.raises(BadInput, match=r"preprocessor_config\.json"):
        load_config(tmp_path, **{field: value})


def test_a_gpu_computes_the_same_pixel_values(processor):
    images = np.random.default_rng(0).integers(0, 256, (2, 2, 224, 224, 3), dtype=np.uint8)
    pixels = pixel_values_on_device(torch.from_numpy(images), torch.from_numpy(normalised_levels(processor)))
    np.testing.assert_array_equal(pixels.numpy(), pixel_values(images, processor))


# Resize and crop, also against Pillow's Lanczos and closed forms


def random_planes(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (3, height, width), dtype=np.uint8)


def resized_one_product_at_a_time(planes: np.ndarray, size: int) -> np.ndarray:
    """The definition: float32 products added in the order of the inputs, vertically first."""
    for _ in range(2):
        weights = lanczos_weights(planes.shape[1], size)
        sums = np.zeros((3, size, planes.shape[2]), dtype=np.float32)
        for output, source in np.argwhere(weights):
            sums[:, output] += weights[output, source] * planes[:, source]
        planes = sums.transpose(0, 2, 1)
    return np.clip(np.rint(planes), 0, 255).astype(np.uint8)


def test_lanczos_sums_as_if_one_product_at_a_time_also_half_way_between_two_levels():
    ramp = np.arange(256) // 2  # full of ties when reduced by 7/8
    ties = np.stack(
        [np.broadcast_to(ramp, (256, 256)), np.add.outer(ramp, ramp), np.add.outer(ramp, ramp[::-1])]
    )
    for planes, size in (
        (ties.astype(np.uint8), 224),
        (random_planes(256, 192), 112),
        (random_planes(60, 50), 64),
    ):
        np.testing.assert_array_equal(
            lanczos_resize(planes, size), resized_one_product_at_a_time(planes, size)
        )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is another C library")
@pytest.mark.parametrize(("num_in", "num_out"), [(256, 224), (256, 120), (256, 112), (60, 224), (512, 224)])
def test_lanczos_weights_are_those_with_the_sine_of_glibc_which_tensorflow_calls(
    num_in, num_out, monkeypatch
):
    ours, sinf = lanczos_weights(num_in, num_out), ctypes.CDLL("libm.so.6").sinf
    sinf.restype, sinf.argtypes = ctypes.c_float, [ctypes.c_float]
    monkeypatch.setattr(images, "_sine", np.vectorize(sinf, otypes=[np.float32]))
    np.testing.assert_array_equal(ours, lanczos_weights(num_in, num_out))


# Prompts: the vocabulary itself isn't distributed

PROMPTS = json.loads((GOLDEN / "prompts.json").read_text())
SPECIAL = {"<unk>": 0, "<s>": BOS_ID, "</s>": EOS_ID, "▁": EMPTY_TOKEN_ID}


def word_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    """One id a word, as small checkpoints have it; adds BOS by itself like the released files."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    return tokenizer


def test_special_ids_equal_reference():
    assert [PROMPTS[name] for name in ("bos", "eos", "pad", "empty_token")] == [
        BOS_ID,
        EOS_ID,
        PAD_ID,
        EMPTY_TOKEN_ID,
    ]


@pytest.mark.parametrize("case", PROMPTS["cases"], ids=lambda case: repr(case["task"]))
def test_prompt_and_ids_equal_reference(case):
    def encode(text: str, add_special_tokens: bool) -> SimpleNamespace:
        assert text == case["eval_prompt"]
        return SimpleNamespace(ids=case["eval_ids_processor"][0 if add_special_tokens else 1 :])

    assert prompt(case["task"]) == case["eval_prompt"]
    ids = prompt_ids(SimpleNamespace(encode=encode), case["task"])
    assert ids == case["eval_ids_with_29871"]
    assert ids == case["train_input_ids"][: len(ids)]  # so the policy reads what it was trained on


@pytest.mark.parametrize("case", PROMPTS["cases"], ids=lambda case: repr(case["task"]))
def test_ids_of_a_llama_like_tokenizer_equal_reference(case, tmp_path):
    llama_like_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert prompt_ids(load_tokenizer(tmp_path), case["task"]) == case["eval_ids_with_29871"]


def test_padding_and_truncation_saved_in_the_file_do_not_change_the_ids(tmp_path):
    tokenizer = word_tokenizer({**SPECIAL, "stove": 5})
    expected = prompt_ids(tokenizer, "turn on the stove")
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert prompt_ids(load_tokenizer(tmp_path), "turn on the stove") == expected
    assert 5 in expected


@pytest.mark.parametrize(("token", "token_id"), [("<s>", 7), ("</s>", 7), ("▁", 28705)])
def test_the_vocabulary_of_another_model_is_refused(tmp_path, token, token_id):
    word_tokenizer({**SPECIAL, token: token_id}).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadInput, match=r"tokenizer\.json.*Llama-2"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"version https://git-lfs.github.com/spec/v1\noid sha256:0"]
)
def test_a_file_that_is_missing_or_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        BadInput, match="is missing" if content is None else "not a usable tokenizer"
    ) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)
