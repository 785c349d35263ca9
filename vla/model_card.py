"""The README.md of a merged checkpoint: what it was made of, and under which licence it may be passed on."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from vla.adapter_folder import StoredAdapter
from vla.hub import HUB_ID

TAGS = ["robotics", "vision-language-action", "openvla-oft", "libero", "reinforcement-learning"]
TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

An OpenVLA-OFT policy: `{{ base }}` with a trained LoRA adapter (rank {{ rank }}, alpha {{ alpha }}) merged into it.
Evaluate it with the program that trained it; other programs for OpenVLA-OFT load it as a plain checkpoint:

    python eval.py --checkpoint FOLDER_OR_HUB_ID --task-suite SUITE --task-ids ID
"""


def write_card(out: Path, name: str, base: str, base_folder: Path, adapter: StoredAdapter) -> None:
    """Write the card into `out`. `name`: the merged folder's; `base`: folder or hub id of the base."""
    is_on_hub = not Path(base).is_dir() and HUB_ID.fullmatch(base) is not None
    base_card = base_folder / "README.md"
    licence = None  # the base's own page may name one
    if base_card.is_file():
        licence = ModelCard.load(base_card, ignore_metadata_errors=True).data.license
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        license=licence,
        pipeline_tag="robotics",
        tags=TAGS,
    )
    shown_base = base if is_on_hub else Path(base).name  # no folder of this machine
    card = ModelCard.from_template(
        data, template_str=TEMPLATE, name=name, base=shown_base, rank=adapter.rank, alpha=adapter.alpha
    )
    card.save(out / "README.md")
