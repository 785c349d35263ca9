"""Which tasks the pack has everything for: read from their BDDL files, no env is built."""

import re
from functools import cache
from pathlib import Path

from envs.lowpoly.facts import load_facts
from envs.tasks import suite_task, task_names

# LIBERO's arena code picks a scene by the problem that a BDDL file names.
SCENES = {
    "libero_tabletop_manipulation": "libero_tabletop_base_style",
    "libero_kitchen_tabletop_manipulation": "libero_kitchen_tabletop_base_style",
    "libero_living_room_tabletop_manipulation": "libero_living_room_tabletop_base_style",
    "libero_study_tabletop_manipulation": "libero_study_base_style",
    "libero_coffee_table_manipulation": "libero_coffee_table_base_style",
    "libero_floor_manipulation": "libero_floor_base_style",
}
# Fixtures that are part of the scene, and the one category whose file has another name.
IN_SCENE = {"floor", "table", "kitchen_table", "living_room_table", "study_table", "coffee_table"}
FILE_NAMES = {"rack": "simple_rack"}


def covered_tasks(task_suite: str) -> tuple[int, ...]:
    """Ids of the suite's tasks that can be built from the pack."""
    ids = range(len(task_names(task_suite)))
    return tuple(task_id for task_id in ids if not missing_assets(suite_task(task_suite, task_id).bddl))


def missing_assets(bddl: Path) -> tuple[str, ...]:
    """What a task needs and the pack lacks: names of a scene and of categories of objects, sorted."""
    text = bddl.read_text(encoding="utf-8")
    problem = re.search(r"\(problem\s+(\w+)\)", text)
    scene = problem[1].lower() if problem else "(no problem named)"
    categories = set()
    for section in re.findall(r"\(:(?:objects|fixtures)\s([^)]*)\)", text):
        categories.update(re.findall(r"-\s+(\w+)", section))
    needed = {SCENES.get(scene, scene)} | {FILE_NAMES.get(name, name) for name in categories - IN_SCENE}
    return tuple(sorted(needed - _available()))


@cache
def _available() -> frozenset[str]:
    return frozenset(file.name for file in load_facts())
