"""A tokenizer of our own with the id layout of Llama-2's, for small checkpoints.

Llama-2's own files come under a licence of their own. What the model code relies on is kept: `<s>` 1, `</s>` 2, `▁`
29871, one character for each of the action ids 31744..31999, `<PAD>` 32000; an action string after "Out: " gives 29871
first. Words of LIBERO's instructions are one token each, other words are spelled; ids in between are unused.
"""

from pathlib import Path

from contracts import write_json
from vla.prompt import BOS_ID, EMPTY_TOKEN_ID, EOS_ID, PAD_ID
from vla.tokens import ACTION_TOKEN_IDS

BLANK = "▁"  # SentencePiece's sign for a blank
_WORDS = """
In Out What action should robot take
akita alphabet and at back basket bbq between black book both bottle bottom bowl box butter cabinet caddy center cheese
chocolate close compartment cookie cookies cream drawer dressing from front frying in inside it juice ketchup layer left
microwave middle milk moka mug next of off on open orange pan pick place plate pot pots pudding push put rack ramekin
red right salad sauce shelf soup stack stove table the them to tomato top tray turn under up white wine wooden yellow
"""
CHARACTERS = "\n!\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[]_abcdefghijklmnopqrstuvwxyz"
_FIRST_ACTION_CHARACTER = 0x4E00  # any 256 characters that no instruction holds


def vocabulary() -> dict[str, int]:
    """Token -> id."""
    tokens = {"<unk>": 0, "<s>": BOS_ID, "</s>": EOS_ID}
    for token in [*CHARACTERS, "Out", *(BLANK + word for word in _WORDS.split())]:
        tokens[token] = len(tokens)
    tokens[BLANK] = EMPTY_TOKEN_ID
    tokens |= {chr(_FIRST_ACTION_CHARACTER + i): token_id for i, token_id in enumerate(ACTION_TOKEN_IDS)}
    return tokens | {"<PAD>": PAD_ID}


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, which the `tokenizers` and `transformers` libraries read."""
    special = {"<unk>": 0, "<s>": BOS_ID, "</s>": EOS_ID, "<PAD>": PAD_ID}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    blanks = {"type": "Metaspace", "replacement": BLANK, "prepend_scheme": "first", "split": True}
    bos, sequence = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": token, **flags} for token, token_id in special.items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                blanks,
                {"type": "Punctuation", "behavior": "Isolated"},
                {"type": "Split", "pattern": {"String": "\n"}, "behavior": "Isolated", "invert": False},
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, sequence],
            "pair": [bos, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
        },
        "decoder": blanks,
        # Without merges, and with `ignore_merges`, a word is looked up whole and spelled where it is not found.
        "model": {"type": "BPE", "unk_token": "<unk>", "ignore_merges": True, "vocab": vocabulary(), "merges": []},
    }
    write_json(folder / "tokenizer.json", content)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "pad_token": "<PAD>",
            "padding_side": "right",
            "model_max_length": 2048,
        },
    )
