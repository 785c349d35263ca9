"""The rooms of the house and who may import whom: nothing upwards, no circles, loggers named after their modules."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the bottom to the top. Rooms of one floor do not import each other.
FLOORS = [
    {"contracts"},
    {"command_line"},
    {"envs", "vla"},
    {"configs"},
    {"rl", "probes"},
    {"experiment"},
    {"preflight"},
    {"train_grpo", "eval"},
    {"workshop"},
    {"benchmarks"},
]
FLOOR_OF_ROOM = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def source_files() -> list[Path]:
    return [
        path for room in FLOOR_OF_ROOM for path in (*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py"))
    ]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, modules: set[str]) -> Iterator[str]:
    """The project's modules that a file imports, wherever the import stands: in a function or for types alone, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            if submodules:
                yield from submodules
            elif node.module in modules:
                yield node.module


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> the project's modules that it imports."""
    paths = {module_name(path): path for path in source_files()}
    return {name: {*imported_modules(path, {*paths})} - {name} for name, path in paths.items()}


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_nothing_imports_upwards_or_across_its_floor(imports):
    wrong = []
    for module, targets in imports.items():
        for target in targets:
            is_same_room = room_of(target) == room_of(module)
            is_below = FLOOR_OF_ROOM[room_of(target)] < FLOOR_OF_ROOM[room_of(module)]
            if not (is_same_room or is_below):
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle(imports):
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_graph_of_imports_is_not_empty(imports):
    assert "rl.losses" in imports["rl.update"]
    assert len(imports) > 50


def test_loggers_are_named_after_their_modules():
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_logger = isinstance(node, ast.Assign) and "getLogger" in ast.unparse(node.value)
            if is_logger:
                assert ast.unparse(node.value) == "logging.getLogger(__name__)", path
