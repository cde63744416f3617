"""Grammars over a model's tokens, by `llguidance`: which tokens may come next.

A grammar is compiled once and kept; each sequence then has a matcher of its own.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.engine.text.structural_tag import JSON_OPTIONS, TagGrammar
from lockstep.engine.text.vocabulary import Vocabulary
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.grammar import Grammar

FIELD = "structured_outputs"
KEPT = 256
"""Compiled grammars that are kept, those used last."""
MAX_TEXT = 1 << 20


class GrammarMatcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_id: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_id = eos_id

    def mask(self, end_ids: Sequence[int]) -> Tensor:
        """Which tokens may come, (vocab,) bool; one that ends only where the grammar may end.

        None at all where the grammar has failed: `error` then says why.
        """
        # All by numpy: an operation of torch may wait for its threads, hundreds of times as long.
        bits = np.zeros(self._vocab_size, dtype=np.uint8)
        if not self._matcher.is_stopped():
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(words, count=self._vocab_size, bitorder="little")
            bits[self._eos_id] = 0
        if self.error:
            bits[:] = 0
        else:
            bits[list(end_ids)] = self._matcher.is_accepting()
        return torch.from_numpy(bits.view(np.bool_))

    def consume(self, token: int) -> None:
        """Goes on behind a token that is no end; `error` says if it cannot come here."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further; empty where it can."""
        return str(self._matcher.get_error())

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self.error


class Grammars:
    """Compiles grammars for one model, whose vocabulary has `vocab_size` ids."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: Path, vocab_size: int) -> Grammars:
        """Those of the model in a directory."""
        return cls(Vocabulary(directory), vocab_size)

    def compile(self, grammar: Grammar) -> None:
        """Makes sure that a grammar is compiled, which takes up to seconds.

        Raises BadRequest for one that makes no sense, UnsupportedField where there is no tokenizer
        or no `llguidance`.
        """
        if find_spec("llguidance") is None:
            raise UnsupportedField(
                f"{FIELD} needs the package llguidance, which is not installed here: install "
                "lockstep-rl[engine]",
                param=FIELD,
            )
        if len(grammar.text) > MAX_TEXT:
            raise BadRequest(
                f"the grammar has {len(grammar.text)} characters: expected at most {MAX_TEXT}",
                param=FIELD,
            )
        self._vocabulary.load(FIELD)
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, self._source(grammar), log_level=0)
        if matcher.is_error():
            raise BadRequest(
                f"the grammar of {FIELD}, response_format or a tool ({grammar.kind}) cannot be "
                f"held to: {matcher.get_error().splitlines()[0]}",
                param=FIELD,
            )
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """A matcher at the beginning of a grammar. Raises what `compile` raises."""
        self.compile(grammar)
        with self._lock:
            compiled = self._compiled[grammar]
        return GrammarMatcher(compiled.deep_copy(), self._vocab_size, self._tokenizer.eos_token)

    def _source(self, grammar: Grammar) -> str:
        """The grammar as llguidance reads it. Raises BadRequest where it cannot be read."""
        from llguidance import LLMatcher

        text = grammar.text
        match grammar.kind:
            case "json" | "json_object":
                schema = text if grammar.kind == "json" else '{"type": "object"}'
                try:
                    return str(LLMatcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS))
                except ValueError as error:
                    raise BadRequest(f"the schema is no JSON: {error}", param=FIELD) from None
            case "regex":
                return str(LLMatcher.grammar_from_regex(text))
            case "choice":
                options = " | ".join(json.dumps(each) for each in json.loads(text))
                return str(LLMatcher.grammar_from_lark(f"start: {options}"))
            case "grammar":
                return str(LLMatcher.grammar_from_lark(text))
            case "structural_tag":
                added = self._vocabulary.added
                return str(LLMatcher.grammar_from_lark(TagGrammar(added).lark(text)))

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            return LLTokenizer(TokenizerWrapper(_Tokens(self._vocabulary, self._vocab_size)))


class _Tokens:
    """The vocabulary as llguidance reads it. Special tokens are no text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokens = [vocabulary.bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(vocabulary.specials)
        # Ends are decided here and not by llguidance, as every request may have others.
        self.eos_token_id = next(iter(self.special_token_ids), vocab_size - 1)
        self._encode = vocabulary.tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)
