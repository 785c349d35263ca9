"""The README.md and merge_metadata.json of a merged checkpoint: what it was made of, and how well it did.

They name no folder of this machine, so that the checkpoint can be sent on as it is.
"""

import json
import re
import shlex
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData, metadata_load

from contracts import read_json, write_json
from vla.adapter_folder import StoredAdapter
from vla.checkpoint import CheckpointInfo
from vla.hub import HUB_ID

CARD_FILE = "README.md"
METADATA_FILE = "merge_metadata.json"
TAGS = ["robotics", "vision-language-action", "openvla-oft", "libero", "reinforcement-learning"]
LICENCE_FIELDS = ("license", "license_name", "license_link")
SUCCESS = "eval/student_success"  # in metrics.jsonl; _k, _n, _low and _high follow it


def write_card(out: Path, name: str, base: str, info: CheckpointInfo, adapter: StoredAdapter) -> None:
    """Write both files into `out`. `name`: the merged folder's; `base`: folder or hub id of the base."""
    is_on_hub = not Path(base).is_dir() and HUB_ID.fullmatch(base) is not None
    base = base if is_on_hub else Path(base).name
    run = adapter.folder.resolve().parents[1]
    evaluation = read_evaluation(adapter.folder, run)
    made_by = read_json(run / "config.json") if (run / "config.json").is_file() else {}
    command = shlex.join(["python", "train_grpo.py", *map(without_folders, made_by.get("argv", []))])
    task = made_by.get("config", {}).get("task", {})
    task_ids = " ".join(map(str, task.get("task_ids", ())))
    tasks = f"{task['task_suite']} task {task_ids}" if task else "LIBERO"
    task_flags = f" --task-suite {task['task_suite']} --task-ids {task_ids}" if task else ""
    metadata = {
        "base": base,
        "base_fingerprint": adapter.base_fingerprint,
        "adapter": {"rank": adapter.rank, "alpha": adapter.alpha},
        "run": {"command": command, "git": made_by.get("git")} if made_by else None,
        "tasks": tasks,
        "evaluation": evaluation,
    }
    write_json(out / METADATA_FILE, metadata)
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        pipeline_tag="robotics",
        tags=TAGS,
        model_name=name,
        eval_results=[result_of(evaluation, tasks)] if evaluation else None,
    )
    for field, value in read_licence(info.weights_folder, base if is_on_hub else None).items():
        data[field] = value
    lines = [
        f"# {name}",
        "",
        f"An OpenVLA-OFT policy for {tasks}: `{base}` with a trained LoRA adapter (rank {adapter.rank}, alpha "
        f"{adapter.alpha}) merged into it.",
        "",
    ]
    if evaluation:
        lines += [describe_evaluation(evaluation, tasks), ""]
    if made_by:
        lines += ["Trained by", "", f"    {command}", ""]
    lines += [
        "Evaluate it with the same program; other programs for OpenVLA-OFT load it as a plain checkpoint:",
        "",
        f"    python eval.py --checkpoint FOLDER_OR_HUB_ID{task_flags}",
        "",
    ]
    (out / CARD_FILE).write_text(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines), encoding="utf-8")


def read_evaluation(adapter: Path, run: Path) -> dict[str, float] | None:
    """The run's evaluation of this checkpoint: its metrics and global_step. None if there is none."""
    step = adapter.resolve().name.removeprefix("step_")
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        return None
    for line in metrics.read_text().splitlines():
        if f"{SUCCESS}_k" in line:
            row = json.loads(line)
            if str(row["global_step"]) == step:
                return {key: value for key, value in row.items() if key.startswith(("global_step", "eval/"))}
    return None


def describe_evaluation(evaluation: dict[str, float], tasks: str) -> str:
    """The greedy success of the checkpoint in one paragraph."""
    low = 100 * evaluation[f"{SUCCESS}_low"]
    high = 100 * evaluation[f"{SUCCESS}_high"]
    return (
        f"Greedy success on {tasks} after {evaluation['global_step']:,} env steps: {evaluation[f'{SUCCESS}_k']} of "
        f"{evaluation[f'{SUCCESS}_n']} episodes = {100 * evaluation[SUCCESS]:.0f} %, 95 % interval [{low:.0f}, "
        f"{high:.0f}]. If this checkpoint is the `best` of its run, these episodes chose it, which flatters it."
    )


def result_of(evaluation: dict[str, float], tasks: str) -> EvalResult:
    """The same in the hub's format."""
    return EvalResult(
        task_type="robotics",
        dataset_type="libero",
        dataset_name=f"LIBERO {tasks}",
        metric_type="success_rate",
        metric_name=f"greedy success, {evaluation[f'{SUCCESS}_k']} of {evaluation[f'{SUCCESS}_n']} episodes",
        metric_value=evaluation[SUCCESS],
    )


def read_licence(base_folder: Path, hub_id: str | None) -> dict[str, str]:
    """The fields of the licence that the base's card names; where it names none, a reference to the base."""
    card = base_folder / CARD_FILE
    try:
        fields = metadata_load(card) if card.is_file() else None
    except Exception:  # it is not YAML
        fields = None
    if fields and "license" in fields:
        return {key: fields[key] for key in LICENCE_FIELDS if key in fields}
    licence = {"license": "other", "license_name": "as-the-base"}
    return licence | ({"license_link": f"https://huggingface.co/{hub_id}"} if hub_id else {})


def without_folders(argument: str) -> str:
    """An argument of a command line, of an absolute path only the last name."""
    return re.sub(r"(^|=)[/~].*/(?=.)", r"\1", argument)
