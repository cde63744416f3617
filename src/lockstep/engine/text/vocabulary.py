"""The tokenizer in the model's directory, needed only for stop strings and grammars."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.tokens.errors import UnsupportedField
from lockstep.tokens.token_bytes import TokenBytesTable

FILE = "tokenizer.json"


class Vocabulary:
    """The bytes of each token of a model, read on first use.

    Special tokens have no text, so they are no part of a stop string.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE
        self._lock = threading.Lock()

    def load(self, field: str) -> None:
        """Read the tokenizer, which may take seconds. Raises UnsupportedField if there is none.

        `field` is the request option that needs it.
        """
        if not self.path.is_file():
            raise UnsupportedField(
                f"{field} needs the model's tokenizer, but {self.path} does not exist: put it "
                "there, or stop by token ids (stop_token_ids)",
                param=field,
            )
        with self._lock:
            self._table  # noqa: B018

    def text(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for special and padding tokens."""
        return b"" if token_id in self.specials else self.bytes_of(token_id)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, special or not; none for a padding id."""
        return self._table.data(token_id)

    def special(self, token_id: int) -> str | None:
        """Return the text of a special token, or None for all others."""
        return self.specials.get(token_id)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the `tokenizers` package."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.path))

    @cached_property
    def _table(self) -> TokenBytesTable:
        return TokenBytesTable(_TableSource(self.tokenizer))

    @cached_property
    def added(self) -> dict[str, int]:
        """The ids of all added tokens, special or not, by their text."""
        decoder = self.tokenizer.get_added_tokens_decoder()
        return {token.content: at for at, token in decoder.items()}

    @cached_property
    def specials(self) -> dict[int, str]:
        """The texts of the special tokens by id."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {at: token.content for at, token in added if token.special}


class _TableSource:
    """Adapter from the `tokenizers` package to the interface that `TokenBytesTable` reads."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer
        self.convert_ids_to_tokens = tokenizer.id_to_token
        self.added_tokens_decoder = {
            at: _AddedToken(token.content, token.special)
            for at, token in tokenizer.get_added_tokens_decoder().items()
        }


class _AddedToken(str):
    """The text of an added token, and whether it is special."""

    special: bool

    def __new__(cls, text: str, special: bool) -> _AddedToken:
        added = super().__new__(cls, text)
        added.special = special
        return added
