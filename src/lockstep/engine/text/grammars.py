"""Constrained decoding by `llguidance`: which tokens a grammar allows next.

A grammar is compiled once, in a process of its own, and cached. Each sequence has its own matcher.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path

from lockstep.engine.text import grammar_server as wire
from lockstep.engine.text.grammar_process import (
    FIELD,
    LIMITS,
    GrammarMatcher,
    GrammarProcess,
    GrammarServer,
)
from lockstep.engine.text.structural_tag import TagGrammar
from lockstep.engine.text.vocabulary import Vocabulary
from lockstep.tokens.errors import BadRequest, Busy, GrammarLimit, UnsupportedField
from lockstep.tokens.grammar import Grammar

CACHED = 32
"""Compiled grammars, and so processes, that are kept for later requests."""
CACHED_FAILURES = 1024
"""Grammars beyond a limit that are rejected at once when they are sent again."""
MAX_TEXT = 1 << 20


class Grammars:
    """Compiler and cache of grammars for one model with `vocab_size` token ids."""

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, limits: wire.Limits = LIMITS
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_id = vocab_size - 1
        self._server = GrammarServer(self._setup, limits)
        self._compiled: OrderedDict[Grammar, GrammarProcess] = OrderedDict()
        self._failures: OrderedDict[str, GrammarLimit] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, directory: Path, vocab_size: int) -> Grammars:
        """Return the grammars of the model in a directory."""
        return cls(Vocabulary(directory), vocab_size)

    def find(self, grammar: Grammar) -> GrammarProcess | None:
        """Return the process of a cached grammar, or None."""
        with self._lock:
            process = self._compiled.get(grammar)
            if process is None or process.error:
                return None
            self._compiled.move_to_end(grammar)
            return process

    def compile(self, grammar: Grammar) -> GrammarProcess:
        """Return the process of a grammar, compiled unless it is cached. This may take seconds.

        The process lives as long as it is cached or referenced. Raises BadRequest for an invalid
        grammar, GrammarLimit for one beyond the limits, Busy when all grammars need too much
        memory, UnsupportedField without a tokenizer or `llguidance`.
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
            if (failure := self._failures.get(grammar.digest)) is not None:
                raise failure.with_message(failure.message)
        if (process := self.find(grammar)) is not None:
            return process
        # Compile outside the lock. Two threads may compile the same grammar, which is harmless.
        try:
            process = self._server.compile(self._source(grammar))
        except GrammarLimit as error:
            self._remember(grammar, error)
            raise
        with self._lock:
            self._compiled[grammar] = process
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return process

    def matcher(self, grammar: Grammar, process: GrammarProcess | None = None) -> GrammarMatcher:
        """Return a new matcher at the start of a grammar. Raises what `compile` raises.

        `process` is the result of an earlier `compile`, if there was one.
        """
        process = process or self.compile(grammar)
        return process.matcher(self._vocab_size, self._eos_id)

    def reject(self, grammar: Grammar, process: GrammarProcess) -> GrammarLimit | Busy:
        """Return the error for a grammar whose process ended while it was followed.

        Later requests with a grammar that exceeded a limit of its own are rejected at once.
        """
        reason = f"the grammar could not be followed to its end: {process.error}"
        if process.crowded:
            return Busy(reason, param=FIELD)
        error = GrammarLimit(reason, param=FIELD)
        self._remember(grammar, error)
        return error

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._compiled.clear()
        self._server.close()

    def _remember(self, grammar: Grammar, error: GrammarLimit) -> None:
        with self._lock:
            self._compiled.pop(grammar, None)
            self._failures[grammar.digest] = error
            while len(self._failures) > CACHED_FAILURES:
                self._failures.popitem(last=False)

    def _setup(self) -> wire.Setup:
        vocabulary = self._vocabulary
        specials = sorted(vocabulary.specials)
        # A matcher decides about end tokens, because they differ between requests.
        self._eos_id = next(iter(specials), self._vocab_size - 1)
        return wire.Setup(
            tokenizer=str(vocabulary.path),
            tokens=[vocabulary.bytes_of(token) for token in range(self._vocab_size)],
            special_ids=specials,
            eos_id=self._eos_id,
            limits=self._server.limits,
        )

    def _source(self, grammar: Grammar) -> wire.GrammarSource:
        """Return the grammar as the compiler reads it. Raises BadRequest for an invalid tag."""
        match grammar.kind:
            case "json":
                return wire.GrammarSource("json", grammar.text)
            case "json_object":
                return wire.GrammarSource("json", '{"type": "object"}')
            case "regex":
                return wire.GrammarSource("regex", grammar.text)
            case "choice":
                options = " | ".join(json.dumps(option) for option in json.loads(grammar.text))
                return wire.GrammarSource("lark", f"start: {options}")
            case "grammar":
                return wire.GrammarSource("lark", grammar.text)
            case "structural_tag":
                return wire.GrammarSource(
                    "lark", TagGrammar(self._vocabulary.added).lark(grammar.text)
                )
