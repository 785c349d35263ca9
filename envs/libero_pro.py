"""The tasks of LIBERO-PRO (Zhou et al. 2025), as published: four changes of each of LIBERO's four suites.

swap: objects change places; object: they have other looks or sizes; lan: other words; task: another goal.
"""

from functools import partial

from envs.bddl import read_instruction
from envs.data_packages import LIBERO_PRO, packaged_file
from envs.tasks import TaskFiles, instruction_in, split_suite, task_name

# Categories of the suites *_object -> the category of LIBERO whose class treats its model in the same way. Their models
# are in the packages of requirements-assets.txt.
CATEGORIES = {
    "bigger_akita_black_bowl": "akita_black_bowl",
    "bigger_alphabet_soup": "alphabet_soup",
    "black_bowl": "akita_black_bowl",
    "blue_ketchup": "alphabet_soup",
    "brown_rack": "wine_rack",
    "green_bbq_sauce": "bbq_sauce",
    "green_butter": "butter",
    "green_chocolate_pudding": "chocolate_pudding",
    "red_basket": "basket",
    "red_cream_cheese": "cream_cheese",
    "red_salad_dressing": "salad_dressing",
    "white_bottle": "wine_bottle",
    "yellow_cabinet": "wooden_cabinet",
    "yellow_milk": "alphabet_soup",
    "yellow_moka_pot": "moka_pot",
    "yellow_plate": "plate",
    "yellow_stove": "flat_stove",
    "yellow_tomato_sauce": "tomato_sauce",
}


def pro_task(task_suite: str, task_id: int) -> TaskFiles:
    """The files of a task of LIBERO-PRO. Raises BadInput if its package is not there.

    All files have the names of LIBERO's own, from which an instruction can be derived. It is right for swap and object,
    whose files say it in other words. For lan and task only the sentence in the file is right.
    """
    name = task_name(task_suite, task_id)
    bddl = packaged_file(LIBERO_PRO, f"libero/libero/bddl_files/{task_suite}/{name}.bddl")
    states = packaged_file(LIBERO_PRO, f"libero/libero/init_files/{task_suite}/{name}.pruned_init.npz")
    _, change = split_suite(task_suite)
    sentence_in_file = read_instruction(bddl)  # it also checks the file
    instruction = sentence_in_file if change in ("lan", "task") else instruction_in(name)
    return TaskFiles(name, instruction, bddl, states)


def register_categories() -> None:
    """Teach LIBERO the categories of LIBERO-PRO, so that it can build tasks that name them."""
    from libero.libero.envs.base_object import OBJECTS_DICT

    for category, category_of_libero in CATEGORIES.items():
        OBJECTS_DICT[category] = partial(OBJECTS_DICT[category_of_libero], obj_name=category)
