"""The README.md and merge_metadata.json of a merged checkpoint: what it was made of, and how well it did.

Paths in commands are shortened to their last name, so that the checkpoint can be sent on as it is.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData, metadata_load

from contracts import BadInput, write_json
from json_fields import read_fields
from vla.adapter_folder import StoredAdapter
from vla.checkpoint import CheckpointInfo
from vla.hub import HUB_ID

CARD_FILE = "README.md"
METADATA_FILE = "merge_metadata.json"
TAGS = ["robotics", "vision-language-action", "openvla-oft", "libero", "reinforcement-learning"]
LICENCE_FIELDS = ("license", "license_name", "license_link")


@dataclass
class _Episode:
    """The fields of an episode of a run's evaluation that a card counts."""

    actor: str
    mode: str
    success: bool


@dataclass
class Evaluation:
    """The evaluation of a checkpoint in its run."""

    episodes: list[_Episode]

    def successes(self, mode: str) -> tuple[int, int]:
        """In how many of how many episodes the student has succeeded by this way of deciding."""
        outcomes = [
            episode.success for episode in self.episodes if (episode.actor, episode.mode) == ("student", mode)
        ]
        return sum(outcomes), len(outcomes)


@dataclass
class _Task:
    task_suite: str
    task_ids: list[int]

    def __str__(self) -> str:
        return f"{self.task_suite} task {' '.join(map(str, self.task_ids))}"


@dataclass
class _Settings:
    task: _Task


@dataclass
class _Run:
    """The fields of a run's config.json that a card names."""

    argv: list[str]
    config: _Settings
    git: dict[str, object] = field(default_factory=dict)
    resume_argv: list[list[str]] = field(default_factory=list)

    @property
    def commands(self) -> list[str]:
        """The command that started the run, and those that resumed it."""
        return [
            shlex.join(["python", "train_grpo.py", *map(without_folders, argv)])
            for argv in (self.argv, *self.resume_argv)
        ]


def write_card(out: Path, name: str, base: str, info: CheckpointInfo, adapter: StoredAdapter) -> None:
    """Write both files into `out`. `name`: the merged folder's; `base`: folder or hub id of the base."""
    is_on_hub = not Path(base).is_dir() and HUB_ID.fullmatch(base) is not None
    base = base if is_on_hub else Path(base).name
    folder = adapter.folder.resolve().parent.parent  # RUN of RUN/checkpoints/step_N
    run = read_run(folder)
    evaluation = None if run is None else read_evaluation(folder, adapter.folder)
    tasks = "LIBERO" if run is None else str(run.config.task)
    metadata = {
        "base": base,
        "base_fingerprint": adapter.base_fingerprint,
        "adapter": {"rank": adapter.rank, "alpha": adapter.alpha},
        "run": None if run is None else {"commands": run.commands, "git": run.git},
        "tasks": tasks,
        "evaluation": None if evaluation is None else rates_of(evaluation),
    }
    write_json(out / METADATA_FILE, metadata)
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        pipeline_tag="robotics",
        tags=TAGS,
        model_name=name,
        eval_results=[result_of(evaluation, tasks)] if evaluation else None,
    )
    for licence_field, value in read_licence(info.weights_folder, base if is_on_hub else None).items():
        data[licence_field] = value
    paragraphs = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"An OpenVLA-OFT policy for {tasks}: `{base}` with a trained LoRA adapter (rank {adapter.rank}, alpha "
        f"{adapter.alpha}) merged into it.",
        *describe_training(run, evaluation),
    ]
    (out / CARD_FILE).write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def describe_training(run: _Run | None, evaluation: Evaluation | None) -> list[str]:
    """The card's paragraphs on success, training and use."""
    paragraphs = []
    task_flags = ""
    if run is not None:
        task = run.config.task
        task_flags = f" --task-suite {task.task_suite} --task-ids {' '.join(map(str, task.task_ids))}"
        if evaluation is not None:
            paragraphs.append(describe_evaluation(evaluation, str(task)))
        paragraphs += ["Trained by", "\n".join(f"    {command}" for command in run.commands)]
    paragraphs += [
        "Evaluate it with the same program; other programs for OpenVLA-OFT load it as a plain checkpoint:",
        f"    python eval.py --checkpoint FOLDER_OR_HUB_ID{task_flags}",
    ]
    return paragraphs


def read_run(folder: Path) -> _Run | None:
    """The run's description. None if the adapter does not lie in a run's folder, or if the file is damaged."""
    try:
        return read_fields(folder / "config.json", _Run)
    except BadInput:
        return None


def read_evaluation(run_folder: Path, adapter: Path) -> Evaluation | None:
    """The run's evaluation of this checkpoint. None if there is none, or if its file is damaged."""
    try:
        return read_fields(run_folder / "evaluations" / f"{adapter.resolve().name}.json", Evaluation)
    except BadInput:
        return None


def rates_of(evaluation: Evaluation) -> dict[str, str]:
    """The success of the greedy and of the sampled policy, each as k of n."""
    rates = {}
    for name, mode in (("greedy", "greedy"), ("sampled", "sample")):
        k, n = evaluation.successes(mode)
        if n > 0:
            rates[name] = f"{k} of {n} episodes"
    return rates


def describe_evaluation(evaluation: Evaluation, tasks: str) -> str:
    """The success of the checkpoint in one paragraph."""
    rates = ", ".join(f"{name} in {rate}" for name, rate in rates_of(evaluation).items())
    return (
        f"Success on {tasks}: {rates}. If this checkpoint is the `best` of its run, these episodes chose it, which "
        "flatters it."
    )


def result_of(evaluation: Evaluation, tasks: str) -> EvalResult:
    """The greedy success in the hub's format."""
    k, n = evaluation.successes("greedy")
    return EvalResult(
        task_type="robotics",
        dataset_type="libero",
        dataset_name=f"LIBERO {tasks}",
        metric_type="success_rate",
        metric_name=f"greedy success, {k} of {n} episodes",
        metric_value=k / n,
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
    """An argument of a command line; of a path that begins with a slash, ~ or a dot only the last name."""
    return re.sub(r"(^|=)[/~.].*/(?=.)", r"\1", argument)
