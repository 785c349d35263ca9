"""A tokenizer of Llama-2's kind: BPE of whole sentences, blanks as "▁", byte fallback; real ids where known."""

from itertools import pairwise

from tokenizers import Tokenizer, models, normalizers, processors

from vla.tokens import BOS_ID, EMPTY_TOKEN_ID, EOS_ID

# The pieces of the golden prompts with their ids. The order is that of the merges; others would do as well, as long as
# BPE finds these pieces.
PIECES = {
    "ment": 358, "▁between": 1546, "▁cabinet": 28966, "▁open": 1722, "▁middle": 7256, "oka": 17029, "▁?": 1577,
    "le": 280, ".": 29889, "▁st": 380, "▁it": 372, "ots": 1862, "ame": 420, ",": 29892, "▁wine": 19006, "▁on": 373,
    "▁and": 322, "Out": 3744, "?": 29973, "▁dra": 7482, "▁place": 2058, "addy": 25644, "▁compart": 29078,
    "▁action": 3158, "▁bott": 18046, "▁the": 278, "▁put": 1925, "▁take": 2125, "ove": 994, "kin": 9089, "▁of": 310,
    "▁top": 2246, "▁both": 1716, "▁turn": 2507, "▁up": 701, "▁in": 297, "▁In": 512, "▁plate": 15284, "▁c": 274,
    "▁should": 881, "▁go": 748, "▁back": 1250, "▁What": 1724, "▁to": 304, "▁bow": 12580, "▁m": 286, "▁black": 4628,
    "wer": 556, "▁robot": 19964, "l": 29880, ":": 29901, "▁pick": 5839, "▁book": 3143, "▁p": 282, "▁r": 364,
}  # fmt: skip


def llama_like_tokenizer() -> Tokenizer:
    """A tokenizer that splits the golden prompts as Llama-2's does, into the same ids."""
    vocabulary = {"<unk>": 0, "<s>": BOS_ID, "</s>": EOS_ID, "▁": EMPTY_TOKEN_ID, **PIECES}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges: dict[tuple[str, str], None] = {}  # an ordered set
    for piece in PIECES:
        tails = [piece[start:] for start in range(len(piece))]
        # A piece grows from its last character to the left: "c", "bc", "abc".
        for shorter, longer in pairwise(reversed(tails)):
            merges[longer[0], shorter] = None
        for part in (*tails, *piece):
            vocabulary.setdefault(part, 40_000 + len(vocabulary))
    model = models.BPE(vocabulary, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special_tokens = [("<s>", BOS_ID)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special_tokens)
    return tokenizer
