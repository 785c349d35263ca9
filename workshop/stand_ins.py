"""Make the policies that stand in for public checkpoints, and print how each succeeds by every rule of acting.

    python -m workshop.stand_ins OUT                          # all; the last two have 7.5 billion parameters
    python -m workshop.stand_ins OUT --only bundled goal      # some
    python -m workshop.stand_ins OUT --measure runs/RUN/checkpoints/latest --only bundled   # a policy that exists

Public checkpoints learned from people. Greedy, they succeed most often; sampled, less often; and the medians of their
token distributions succeed about as often as their likeliest tokens. A stand-in must behave alike, or what is measured
with it says nothing about them:

* greedy succeeds at least 10 points more often than sampled at temperature 1;
* greedy and median are at most 10 points apart.

Demonstrations are collected, networks are trained and episodes are played by the program's own commands, which are
printed. Different policies are made and measured side by side on this machine's cores and GPUs; for one alone give more
--num-envs. What exists in OUT is not made again. A policy is measured on fresh initial states, which no demonstration
began from.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

import tyro

from command_line import main_guard, parse_flags
from configs.bounds import POSITIVE, check_fields
from envs.machine import usable_cores
from experiment.episodes import Rule
from experiment.results import read_results
from experiment.statistics import count_successes
from workshop.side_by_side import run, run_side_by_side

MOVED = "--move-objects 2 4 6 8"  # cm
SPATIAL = f"--task-ids 0 {MOVED}"
# Folder of demonstrations -> flags of workshop.demos.
DEMONSTRATIONS = {
    "spatial-lowpoly": f"{SPATIAL} --assets lowpoly --episodes 200 --seed 7",
    "spatial-official": f"{SPATIAL} --assets official --episodes 200 --seed 8",
    "goal": f"--task-suite libero_goal --task-ids 1 4 8 {MOVED} --assets lowpoly --episodes 90 --seed 9",
    "few": "--task-ids 0 --assets lowpoly --episodes 40 --seed 7",
}
BOTH_LOOKS = ("spatial-lowpoly", "spatial-official")


def supervised(flags: str) -> dict[str, str]:
    """The folder in OUT that a program writes, and the program, which trains a small policy.

    OUT stands for the folder of all, NAME for the policy's, DEMOS for its demonstrations.
    """
    return {
        "NAME": f"-m workshop.sft --demos DEMOS --out OUT/NAME --batch-size 128 --warmup-steps 100 {flags}"
    }


SMALL = "--num-images 1 --no-proprio --llm-dim 96 --patch-size 20"
TRUE_GEOMETRY = "--image-size 224 --patch-size 14 --vision-dim 64 --llm-dim 256 --llm-heads 2"


@dataclass(frozen=True)
class StandIn:
    """A policy, from what it learns, how it is made, and where it is measured."""

    demonstrations: tuple[str, ...]
    programs: Mapping[str, str]  # folder in OUT -> the program that writes it, one after the other
    # Percent of greedy successes that it is meant to have; if it has an L1 head, of that one.
    greedy: tuple[int, int]
    tasks: str = "--task-suite libero_spatial --task-ids 0"
    num_tasks: int = 1
    has_l1_head: bool = False
    needs: str | None = None  # a policy that must exist before


Name = Literal["bundled", "strong", "goal", "l1", "grown", "full", "random"]
STAND_INS: dict[Name, StandIn] = {
    "bundled": StandIn(BOTH_LOOKS, supervised(f"{SMALL} --steps 1300"), (25, 60)),
    "strong": StandIn(("spatial-lowpoly",), supervised(f"{SMALL} --steps 1900"), (80, 90)),
    "goal": StandIn(
        ("goal",),
        supervised(f"{SMALL} --steps 950"),
        (30, 50),
        "--task-suite libero_goal --task-ids 1 4 8",
        num_tasks=3,
    ),
    "l1": StandIn(("spatial-lowpoly",), supervised("--l1 --steps 300"), (60, 80), has_l1_head=True),
    "grown": StandIn(
        ("spatial-lowpoly",),
        supervised(f"--num-images 1 --no-proprio {TRUE_GEOMETRY} --steps 850"),
        (30, 50),
    ),
    "full": StandIn(
        (),
        {"NAME": "-m benchmarks.full_size OUT/NAME --grow OUT/grown --noise 0.05"},
        (30, 50),
        needs="grown",
    ),
    "random": StandIn(
        ("few",),
        {
            "random-base": "-m benchmarks.full_size OUT/random-base",
            "random-adapters": "-m workshop.sft --init OUT/random-base --demos DEMOS --out OUT/random-adapters "
            "--lora-rank 32 --batch-size 28 --steps 200 --warmup-steps 15 --lr 1e-3 --memory-budget 40",
            "NAME": "-m vla.merge --adapter OUT/random-adapters --out OUT/NAME",
        },
        (30, 50),
    ),
}

GREEDY = Rule("greedy")
MEDIAN = Rule("median")
SAMPLED = Rule("sample", 1.0)
RULES = (GREEDY, MEDIAN, SAMPLED, Rule("sample", 0.6))
LEAST_GAIN_OF_GREEDY = 10  # points above sampled at temperature 1
LARGEST_GAP_TO_MEDIAN = 10  # points


@dataclass(frozen=True)
class Args:
    """Make the policies that stand in for public checkpoints, and measure how they succeed by every rule."""

    # Folder to write, or to go on with.
    out: tyro.conf.Positional[Path]
    # Names of the policies to make.
    only: tuple[Name, ...] = tuple(STAND_INS)
    # A checkpoint to measure as the policies of --only are, instead of making them.
    measure: str | None = None
    # Fresh initial states on which each policy is measured by each rule, in all tasks together.
    states: Annotated[int, POSITIVE] = 200
    # Looks in which policies are measured.
    looks: tuple[Literal["lowpoly", "official"], ...] = ("lowpoly",)
    # Simulators of one evaluation.
    num_envs: Annotated[int, POSITIVE] = 3
    # Evaluations that are played at the same time, one for each policy and look. That of a 7B holds 15 GB of weights.
    at_once: Annotated[int, POSITIVE] = max(1, usable_cores() // 4)

    def __post_init__(self) -> None:
        check_fields(self)


def main(argv: Sequence[str]) -> None:
    args = parse_flags(Args, argv, prog="python -m workshop.stand_ins")
    if args.measure is None:
        make(args)
    measure(args)


def make(args: Args) -> None:
    """Collect the demonstrations, one folder after the other, and then make all policies that do not exist."""
    folders = dict.fromkeys(folder for name in args.only for folder in STAND_INS[name].demonstrations)
    for folder in folders:
        flags = f"--num-envs {usable_cores()} {DEMONSTRATIONS[folder]}"
        command = f"-m workshop.demos --out {args.out}/demonstrations/{folder} {flags}"
        run(args.out / f"{folder}.log", [command])
    missing = [name for name in args.only if not (args.out / name).exists()]
    independent = [name for name in missing if STAND_INS[name].needs is None]
    dependent = [name for name in missing if name not in independent]
    for names in (independent, dependent):
        programs = {args.out / f"{name}.log": programs_of(args, name) for name in names}
        run_side_by_side(programs, at_once=max(1, len(names)))


def programs_of(args: Args, name: Name) -> list[str]:
    """The programs that make a policy; not those whose folder exists."""
    stand_in = STAND_INS[name]
    folders = " ".join(f"{args.out}/demonstrations/{folder}" for folder in stand_in.demonstrations)
    values = {"DEMOS": folders, "OUT": str(args.out), "NAME": name}
    return [
        re.sub("DEMOS|OUT|NAME", lambda word: values[word[0]], program)
        for folder, program in stand_in.programs.items()
        if not (args.out / folder.replace("NAME", name)).exists()
    ]


def measure(args: Args) -> None:
    """Play the episodes of all policies and looks side by side, and print a table for each policy and look."""
    parts = list(product(args.only, args.looks))
    programs = {
        results_file(args, name, looks).with_suffix(".log"): evaluations(args, name, looks)
        for name, looks in parts
    }
    run_side_by_side(programs, args.at_once)
    for name, looks in parts:
        print(f"\n{args.measure or args.out / name}, {looks} pictures, fresh states:")
        results = read_results(results_file(args, name, looks))
        # Beside an L1 head the token head is untrained, so it is not measured.
        rules = (Rule("l1"),) if STAND_INS[name].has_l1_head else RULES
        print_table({rule: [*results.outcomes(rule).values()] for rule in rules}, STAND_INS[name])


def results_file(args: Args, name: Name, looks: str) -> Path:
    measured: str = name
    if args.measure is not None:
        measured += "-" + Path(args.measure).resolve().as_posix().replace("/", "-")
    return args.out / "measured" / f"{measured}-{looks}.json"


def evaluations(args: Args, name: Name, looks: str) -> list[str]:
    """The programs that play a policy by all rules, one temperature each; what was played is not played again."""
    stand_in = STAND_INS[name]
    program = (
        f"eval.py --checkpoint {args.measure or args.out / name} {stand_in.tasks} "
        f"--assets {looks} --init-states fresh --trials {ceil(args.states / stand_in.num_tasks)} "
        f"--num-envs {args.num_envs} --out {results_file(args, name, looks)}"
    )
    if stand_in.has_l1_head:
        return [f"{program} --mode l1"]
    return [
        f"{program} --mode greedy median sample --temperature 1",
        f"{program} --mode sample --temperature 0.6",
    ]


def print_table(outcomes: dict[Rule, list[bool]], stand_in: StandIn) -> None:
    """Print the success by every rule, and whether the policy behaves as a stand-in must."""
    for rule, successes in outcomes.items():
        print(f"  {rule!s:<17} {count_successes(successes)}")
    percents = {rule: 100 * count_successes(successes).rate for rule, successes in outcomes.items()}
    low, high = stand_in.greedy
    first_rule, first_percent = next(iter(percents.items()))
    print_verdict(low <= first_percent <= high, f"{first_rule} in {low} to {high} %")
    if not stand_in.has_l1_head:
        gain = percents[GREEDY] - percents[SAMPLED]
        gap = abs(percents[GREEDY] - percents[MEDIAN])
        print_verdict(gain >= LEAST_GAIN_OF_GREEDY, f"greedy is {gain:.1f} points above sampled at T = 1")
        print_verdict(gap <= LARGEST_GAP_TO_MEDIAN, f"greedy and median are {gap:.1f} points apart")


def print_verdict(holds: bool, rule: str) -> None:
    print(f"  {'holds' if holds else 'FAILS'}: {rule}")


if __name__ == "__main__":
    sys.exit(main_guard("workshop.stand_ins", main))
