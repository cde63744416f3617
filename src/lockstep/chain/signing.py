"""Signatures of records: ed25519, over the canonical JSON of a record without its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.chain.records import Chain, Sign, canonical
from lockstep.tokens.errors import BadRequest

INSTALL = "pip install 'lockstep-rl[sign]'"


def load_signer(path: str | Path) -> tuple[Sign, str]:
    """Return the function that signs with the private key of a PEM file, and its public key in hex.

    `openssl genpkey -algorithm ed25519 -out run.pem` makes such a file. Raises BadRequest for
    another kind of key, and where the cryptography package is missing.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise BadRequest(
            f"signing needs the cryptography package: {INSTALL}", param="sign"
        ) from None
    try:
        key = load_pem_private_key(Path(path).read_bytes(), password=None)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", param="sign") from None
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{path} is not a private key in PEM: {error}", param="sign") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise BadRequest(
            f"{path} holds a {type(key).__name__}: expected an ed25519 key", param="sign"
        )
    return lambda data: key.sign(data).hex(), key.public_key().public_bytes_raw().hex()


def check_signatures(chain: Chain, public_key: str | None = None) -> list[str]:
    """Return a sentence for each record whose signature is missing or wrong.

    `public_key` is the expected key in hex; without it, the key that the first record names, which
    proves only that one key signed all records. A run without a key has no signatures to check.
    Raises BadRequest for a key that is not 32 bytes in hex.
    """
    key = public_key or chain.start.get("public_key")
    if key is None:
        return []
    if public_key is not None and chain.start.get("public_key") != public_key:
        named = str(chain.start.get("public_key"))[:12]
        return [f"the run names the public key {named!r}, expected {public_key[:12]!r}"]
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise BadRequest(
            f"checking signatures needs the cryptography package: {INSTALL}", param="run"
        ) from None
    try:
        verifier = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
    except ValueError as error:
        raise BadRequest(f"public key {key[:12]!r}: {error}", param="key") from None
    problems = []
    for number, link in enumerate(chain.links, start=1):
        unsigned: dict[str, Any] = dict(link.record)
        try:
            signature = bytes.fromhex(unsigned.pop("signature", ""))
            verifier.verify(signature, canonical(unsigned))
        except (InvalidSignature, ValueError, TypeError):
            problems.append(f"line {number} (step {link.step}) is not signed by {key[:12]}")
    return problems
