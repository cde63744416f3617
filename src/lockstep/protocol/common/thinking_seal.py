"""Signatures of thinking that leaves the gateway, to recognise it when it is sent back.

A seal is an opaque digest of the text, not a secret: it distinguishes unchanged thinking from
thinking that was edited or made elsewhere. The ledger decides by content which turn it belongs to.
"""

from __future__ import annotations

from binascii import b2a_base64
from hashlib import blake2b

PREFIX = "lst1_"
URL_SAFE = bytes.maketrans(b"+/", b"-_")


def seal(text: str) -> str:
    """Return the seal of a text: only letters, digits, `-` and `_`."""
    digest = blake2b(text.strip().encode(errors="surrogatepass"), digest_size=18, person=b"thought")
    # The same as base64.urlsafe_b64encode in half the time: each turn sends every seal again.
    return PREFIX + b2a_base64(digest.digest(), newline=False).translate(URL_SAFE).decode()


def is_broken(text: str, sealed: str) -> bool:
    """Return whether this is one of our seals for another text; foreign seals return False."""
    return sealed.startswith(PREFIX) and bool(text.strip()) and sealed != seal(text)
