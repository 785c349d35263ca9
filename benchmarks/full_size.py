"""A checkpoint of full size, 15 GB, with random weights, in the public format: python -m benchmarks.full_size FOLDER

For measuring time and memory where no real checkpoint is at hand. Needs a GPU, on which the weights are drawn.
"""

import json
import tempfile
from pathlib import Path

import torch
import tyro

from contracts import write_json
from vla.model import OpenVLAOFT, ProprioProjector
from vla.network_config import read_network_config
from vla.network_io import save_checkpoint
from workshop.tiny import make_tiny_checkpoint

CONFIG = {
    "architectures": ["OpenVLAForActionPrediction"],
    "model_type": "openvla",
    "arch_specifier": "no-align+fused-gelu-mlp",
    "image_resize_strategy": "resize-naive",
    "image_sizes": [224, 224],
    "n_action_bins": 256,
    "num_images_in_input": 2,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "text_config": {
        "model_type": "llama",
        "pad_token_id": 32000,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "torch_dtype": "bfloat16",
    "use_fused_vision_backbone": True,
}


def write_full_size(folder: tyro.conf.Positional[Path]) -> None:
    """A full-size folder: random weights made on the GPU, tokenizer and statistics of the small checkpoints."""
    with tempfile.TemporaryDirectory() as small_folder:
        small = make_tiny_checkpoint(Path(small_folder))
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json", "dataset_statistics.json"):
            (folder / name).write_bytes((small / name).read_bytes())
        processor = (small / "preprocessor_config.json").read_text()
    # The only sizes in it are those of the small checkpoint's images.
    write_json(folder / "preprocessor_config.json", json.loads(processor.replace("120", "224")))
    write_json(folder / "config.json", CONFIG)
    with torch.device("meta"):
        network = OpenVLAOFT(read_network_config(folder), num_action_tokens=56)
    network = network.to(torch.bfloat16).to_empty(device="cuda")
    initialise(network)
    network.proprio_projector = ProprioProjector(8, 4096)
    save_checkpoint(folder, network, CONFIG)


@torch.no_grad()
def initialise(network: OpenVLAOFT) -> None:
    """Scales 1, biases 0, all other weights random with standard deviation 1 / sqrt(inputs)."""
    torch.manual_seed(0)
    for name, parameter in network.named_parameters():
        is_vector = parameter.ndim == 1
        is_norm_scale = is_vector and "norm" in name and name.endswith("weight")
        if name.endswith(".gamma") or is_norm_scale:
            parameter.fill_(1.0)
        elif is_vector:
            parameter.zero_()
        else:
            parameter.normal_(0.0, parameter[0].numel() ** -0.5)


if __name__ == "__main__":
    tyro.cli(write_full_size, description=__doc__)
