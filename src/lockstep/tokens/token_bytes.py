"""Exact bytes of each token id, including tokens that are part of a character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A token's bytes, and a string for them.

    `text` is the bytes as UTF-8 where they are whole characters; otherwise it spells them out
    (`bytes:\\xf0\\x9f`), so that two tokens never share a replacement character.
    """

    data: bytes
    text: str


class TokenBytesTable:
    """Map from token ids to bytes, for byte-level and SentencePiece-style vocabularies.

    Models have more ids than their tokenizers where the vocabulary is padded or has gaps. Such an
    id can be sampled; it has no bytes. `id in table` is whether the tokenizer has a token for it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = _is_byte_level(tokenizer)
        # SentencePiece-style vocabularies also add runs of spaces, spelled like any other token.
        self._literal: dict[int, str] = {
            int(at): str(token)
            for at, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
            if self._byte_level or getattr(token, "special", True)
        }
        self._cache: dict[int, bytes] = {}

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._literal or self._token(token_id) is not None

    def piece(self, token_id: int) -> TokenBytes:
        """Return the vocabulary's spelling of a token; an empty one if the id has no token."""
        data = self.data(token_id)
        try:
            return TokenBytes(data, data.decode())
        except UnicodeDecodeError:
            return TokenBytes(data, "bytes:" + "".join(f"\\x{byte:02x}" for byte in data))

    def data(self, token_id: int) -> bytes:
        """Return the bytes that this token adds to the text; none if the id has no token."""
        data = self._cache.get(token_id)
        if data is None:
            data = self._find(token_id)
            if data:  # ids without a token are not cached: there is no end of them
                self._cache[token_id] = data
        return data

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the whole text, including special tokens; only invalid UTF-8 is replaced."""
        return b"".join(map(self.data, token_ids)).decode(errors="replace")

    def stream(self) -> TokenTextDecoder:
        return TokenTextDecoder(self)

    def _find(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode()
        token = self._token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            # As the decoder of `tokenizers` does: a token with any character outside the byte
            # alphabet (Command R+ has emoji in its vocabulary) is plain text.
            if all(char in _BYTES for char in token):
                return bytes(_BYTES[char] for char in token)
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _token(self, token_id: int) -> str | None:
        token = self._tokenizer.convert_ids_to_tokens(token_id) if token_id >= 0 else None
        return token if isinstance(token, str) else None


class TokenTextDecoder:
    """Incremental decoder of a token stream: emits a character once its last byte has arrived."""

    def __init__(self, pieces: TokenBytesTable) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        data = b"".join(map(self._pieces.data, token_ids))
        return self._decoder.decode(data, last)


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None) or getattr(
        tokenizer, "_tokenizer", None
    )
    to_str = getattr(backend, "to_str", None)
    if to_str is None:
        return False
    # The decoder determines which bytes a token's characters represent.
    decoder = getattr(backend, "decoder", None)
    state = decoder.__getstate__() if decoder is not None else b""
    described = json.loads(state or b"{}")
    parts = described.get("decoders", [described])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte, as byte-level BPE has used it since GPT-2."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()
