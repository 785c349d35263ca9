"""Supervised fine-tuning of an OpenVLA-OFT policy on demonstrations: cross-entropy on the action tokens of a chunk.

    python -m workshop.sft --demos FOLDER --out FOLDER [--llm-dim 96 | --init CHECKPOINT] [--steps 6000]
    python -m workshop.sft --demos FOLDER --out FOLDER --num-images 1 --no-proprio    # as public token-head checkpoints
    python -m workshop.sft --demos FOLDER --out FOLDER --l1                           # as public L1 checkpoints
    python -m workshop.sft --demos FOLDER --out FOLDER --init CHECKPOINT --lora-rank 32    # a 7B, too

--demos names folders of workshop.demos, of LeRobot v3 datasets or of RLDS data (workshop/foreign_demos.py).

Without --lora-rank all parameters are trained, and the output is a checkpoint folder like any other. With --lora-rank
the same parameters are trained as by RL, in as much memory: adapters on every linear map, including the token head, and
the proprio projector; the output is an adapter folder, which train_grpo.py and eval.py take as --checkpoint. Both hold
sft_metrics.jsonl, sft_run.json (how it was made) and first_frame.png (what the network sees).

With --l1 an L1 head learns the continuous actions, by their mean absolute error, together with all other parameters
but the token head's: that one keeps its random rows. Such a checkpoint acts, and teaches, by its L1 head.
"""

import signal
import sys
from collections.abc import Sequence

from command_line import handle_stop_signals, main_guard, parse_flags
from experiment.terminal import say
from workshop.sft_config import SftArgs


def main(argv: Sequence[str]) -> None:
    args = parse_flags(SftArgs, argv, prog="python -m workshop.sft")
    say("loading PyTorch ...")
    from workshop.sft_training import fine_tune

    handle_stop_signals(signal.default_int_handler)  # so that temporary files are removed
    fine_tune(args, argv)


if __name__ == "__main__":
    sys.exit(main_guard("workshop.sft", main))
