"""The README.md of a merged checkpoint: what it was made of, and how well it did.

Paths in commands are shortened to their last name, so that the checkpoint can be sent on as it is.
"""

import re
import shlex
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from contracts import BadInput, read_json
from vla.adapter_folder import StoredAdapter
from vla.checkpoint import CheckpointInfo
from vla.hub import HUB_ID

TAGS = ["robotics", "vision-language-action", "openvla-oft", "libero", "reinforcement-learning"]
TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

An OpenVLA-OFT policy for {{ run.tasks }}: `{{ base }}` with a trained LoRA adapter (rank {{ rank }}, alpha {{ alpha }})
merged into it.
{% if run.success %}
Success on {{ run.tasks }}: {{ run.success }}.
If this checkpoint is the `best` of its run, these episodes chose it, which flatters it.
{% endif %}{% if run.commands %}
Trained by

{% for command in run.commands %}    {{ command }}
{% endfor %}{% endif %}
Evaluate it with the same program; other programs for OpenVLA-OFT load it as a plain checkpoint:

    python eval.py --checkpoint FOLDER_OR_HUB_ID{{ run.task_flags }}
"""


def write_card(out: Path, name: str, base: str, info: CheckpointInfo, adapter: StoredAdapter) -> None:
    """Write the card into `out`. `name`: the merged folder's; `base`: folder or hub id of the base."""
    is_on_hub = not Path(base).is_dir() and HUB_ID.fullmatch(base) is not None
    hub_id = base if is_on_hub else None
    data = ModelCardData(
        base_model=hub_id,
        pipeline_tag="robotics",
        tags=TAGS,
        model_name=name,
    )
    for field, value in licence_of(info.weights_folder, hub_id).items():
        data[field] = value
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        name=name,
        base=hub_id or Path(base).name,
        rank=adapter.rank,
        alpha=adapter.alpha,
        run=describe_run(adapter.folder.resolve()),
    )
    card.save(out / "README.md")


def describe_run(adapter: Path) -> dict[str, object]:
    """What the template says about the run of which this is RUN/checkpoints/step_N; less where it is of no run."""
    run = adapter.parent.parent
    try:
        description = read_json(run / "config.json")
        task = description["config"]["task"]
        commands = [description["argv"], *description.get("resume_argv", [])]
    except (BadInput, LookupError, TypeError):
        return {"tasks": "LIBERO", "task_flags": ""}
    task_ids = " ".join(map(str, task["task_ids"]))
    return {
        "tasks": f"{task['task_suite']} task {task_ids}",
        "task_flags": f" --task-suite {task['task_suite']} --task-ids {task_ids}",
        "success": describe_success(run / "evaluations" / f"{adapter.name}.json"),
        "commands": [
            shlex.join(["python", "train_grpo.py", *map(without_folders, argv)]) for argv in commands
        ],
    }


def describe_success(results: Path) -> str:
    """The student's success in a results file, by its ways of deciding; "" if there is no such file."""
    if not results.is_file():
        return ""
    outcomes: dict[str, list[bool]] = {}
    for episode in read_json(results)["episodes"]:
        if episode["actor"] == "student":
            outcomes.setdefault(episode["mode"], []).append(episode["success"])
    return ", ".join(f"{mode} {sum(played)} of {len(played)} episodes" for mode, played in outcomes.items())


def licence_of(base_folder: Path, hub_id: str | None) -> dict[str, str]:
    """The licence that the base's card names; where it names none, a reference to the base."""
    card = base_folder / "README.md"
    licence = ModelCard.load(card, ignore_metadata_errors=True).data.license if card.is_file() else None
    if licence is not None:
        return {"license": licence}
    link = {"license_link": f"https://huggingface.co/{hub_id}"} if hub_id else {}
    return {"license": "other", "license_name": "as-the-base", **link}


def without_folders(argument: str) -> str:
    """An argument of a command line; of a path that begins with a slash, ~ or a dot only the last name."""
    return re.sub(r"(^|=)[/~.].*/(?=.)", r"\1", argument)
