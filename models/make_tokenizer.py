"""Make the tokenizer of the bundled models: python models/make_tokenizer.py --out DIR

A byte-level BPE of 512 tokens in the manner of Qwen3: same pre-tokenizer, same added tokens, same
chat format. No merge contains a newline, so text cut at a line end has the tokens of its parts.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

import corpus
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

VOCABULARY = 512
MAX_LENGTH = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
PAD, _, END = SPECIAL
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(template: str) -> Tokenizer:
    """Train the merges on the corpus and append the added tokens after them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    cut = re.compile("|".join(["\n", *map(re.escape, SPECIAL + ADDED)]))
    pieces = [piece for text in corpus.texts(template) for piece in cut.split(text) if piece]
    tokenizer.train_from_iterator(
        pieces,
        BpeTrainer(
            vocab_size=VOCABULARY - len(SPECIAL) - len(ADDED),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_special_tokens([_added(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([_added(token, special=False) for token in ADDED])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def write(out: Path) -> None:
    """Write tokenizer, chat template and generation settings into the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer = train(template)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "errors": "replace",
            "additional_special_tokens": list(SPECIAL[1:]),
            "model_max_length": MAX_LENGTH,
            "pad_token": PAD,
            "split_special_tokens": False,
            "unk_token": None,
        },
    )
    ends = [tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)]
    _write_json(out / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})


def _added(token: str, *, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
