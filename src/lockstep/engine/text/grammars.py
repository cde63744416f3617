"""Constrained decoding by `llguidance`: which tokens a grammar allows next.

A grammar is compiled once and cached. Each sequence has its own matcher.
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
CACHED = 256
"""Number of compiled grammars in the LRU cache."""
MAX_TEXT = 1 << 20


class GrammarMatcher:
    """The state of one sequence within its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, eos_id: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_id = eos_id

    def mask(self, end_ids: Sequence[int]) -> Tensor:
        """Return the allowed next tokens, (vocab,) bool.

        End tokens are allowed only where the grammar may end. After a failure nothing is allowed,
        and `error` holds the reason.
        """
        # Use numpy: a torch operation may wait for its thread pool, hundreds of times as long.
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
        """Advance past a token that is not an end token. Sets `error` if it is not allowed here."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further, or an empty string."""
        return str(self._matcher.get_error())

    @property
    def complete(self) -> bool:
        """Whether no further token is allowed."""
        return bool(self._matcher.is_stopped()) and not self.error


class Grammars:
    """Compiler and cache of grammars for one model with `vocab_size` token ids."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: Path, vocab_size: int) -> Grammars:
        """Return the grammars of the model in a directory."""
        return cls(Vocabulary(directory), vocab_size)

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar unless it is cached. This may take seconds.

        Raises BadRequest for an invalid grammar, UnsupportedField without a tokenizer or
        `llguidance`.
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

        # Compile outside the lock. Two threads may compile the same grammar, which is harmless.
        matcher = LLMatcher(self._tokenizer, self._source(grammar), log_level=0)
        if matcher.is_error():
            raise BadRequest(
                f"the grammar of {FIELD}, response_format or a tool ({grammar.kind}) cannot be "
                f"held to: {matcher.get_error().splitlines()[0]}",
                param=FIELD,
            )
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Return a new matcher at the start of a grammar. Raises what `compile` raises."""
        self.compile(grammar)
        with self._lock:
            compiled = self._compiled[grammar]
        return GrammarMatcher(compiled.deep_copy(), self._vocab_size, self._tokenizer.eos_token)

    def _source(self, grammar: Grammar) -> str:
        """Return the grammar in llguidance's notation. Raises BadRequest if it cannot be parsed."""
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
                options = " | ".join(json.dumps(option) for option in json.loads(text))
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
    """The vocabulary in the form that llguidance reads. Special tokens have no text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self.tokens = [vocabulary.bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(vocabulary.specials)
        # `mask` decides about end tokens, because they differ between requests.
        self.eos_token_id = next(iter(self.special_token_ids), vocab_size - 1)
        self._encode = vocabulary.tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)
