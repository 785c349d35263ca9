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
    hub_id = base if is_on_hub else None
    data = ModelCardData(
        base_model=hub_id,
        pipeline_tag="robotics",
        tags=TAGS,
        model_name=name,
    )
    for field, value in licence_of(base_folder, hub_id).items():
        data[field] = value
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=name,
        base=hub_id or Path(base).name,  # no folder of this machine
        rank=adapter.rank,
        alpha=adapter.alpha,
    )
    card.save(out / "README.md")


def licence_of(base_folder: Path, hub_id: str | None) -> dict[str, str]:
    """The licence that the base's card names; where it names none, a reference to the base."""
    card = base_folder / "README.md"
    licence = ModelCard.load(card, ignore_metadata_errors=True).data.license if card.is_file() else None
    if licence is not None:
        return {"license": licence}
    link = {"license_link": f"https://huggingface.co/{hub_id}"} if hub_id else {}
    return {"license": "other", "license_name": "as-the-base", **link}
