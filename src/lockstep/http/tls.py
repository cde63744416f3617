"""TLS for listeners and clients: certificates from files, reloaded when they change."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from lockstep.flags import Flag
from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)
listen_flag = partial(Flag, panel="Listening")
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """A certificate (with its intermediate certificates) and its key, as PEM files.

    `ca` holds the CA certificates for the peer: a listener that has it accepts only clients with a
    certificate of these CAs, a client trusts only these CAs.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def check(self) -> None:
        """Raise BadRequest if only one of certificate and key is set."""
        if (self.cert is None) != (self.key is None):
            there, missing = ("key", "certificate") if self.cert is None else ("certificate", "key")
            raise BadRequest(
                f"a TLS certificate and its key are needed together: there is the {there} "
                f"{self.cert or self.key} and no {missing}",
                param="tls_cert",
            )

    def stamp(self) -> Stamp:
        """Return a value that changes when a file does. Raises OSError if a file cannot be read."""
        stamps = []
        for path in (self.cert, self.key, self.ca):
            if path is not None:
                stat = os.stat(path)
                stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(stamps)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the files into a context. Raises OSError, of which ssl.SSLError is one, for an
        unusable file.
        """
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerTls:
    """The flags of a listener's TLS files."""

    tls_cert: Annotated[
        Path | None,
        listen_flag("PEM file of the certificate of both ports; read again when it changes."),
    ] = None
    tls_key: Annotated[Path | None, listen_flag("PEM file of the certificate's key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        listen_flag(
            "PEM file of CA certificates. Clients then need a certificate of one of these CAs: on "
            "both ports of a worker, on the admin port of a gateway."
        ),
    ] = None

    def files(self) -> TlsFiles | None:
        """Return the files of the listener, None without TLS. Raises BadRequest."""
        if self == ListenerTls():
            return None
        files = TlsFiles(cert=self.tls_cert, key=self.tls_key, ca=self.tls_client_ca)
        files.check()
        if self.tls_cert is None:
            raise BadRequest(
                "--tls-client-ca needs --tls-cert and --tls-key: without them there is no TLS",
                param="tls_client_ca",
            )
        return files


def without_ca(files: TlsFiles | None) -> TlsFiles | None:
    """Return the files without `ca`, for a listener whose clients have keys instead of
    certificates.
    """
    return None if files is None else replace(files, ca=None)


class Certificates:
    """A TLS context that follows changes of its files.

    New files that are unusable change nothing. Certificates removed from `ca` are trusted until the
    process ends.
    """

    def __init__(self, files: TlsFiles, new: Callable[[TlsFiles], ssl.SSLContext]) -> None:
        """Raise BadRequest for unusable files."""
        self._files, self._new = files, new
        self._bad: Stamp | None = None
        try:
            self._stamp = files.stamp()
            self.context = new(files)
        except OSError as error:  # ssl.SSLError is one
            raise BadRequest(f"TLS cannot be set up: {_why(error, files)}", param="tls") from None

    def refresh(self) -> None:
        """Reload the files if they have changed; open connections are kept."""
        stamp: Stamp | None = None
        try:
            stamp = self._files.stamp()
            if stamp in (self._stamp, self._bad):
                return
            self._new(self._files)  # try them apart first: half of a new pair must not be served
            self._files.load_into(self.context)
        except OSError as error:
            if stamp != self._bad or stamp is None:
                log.error("TLS certificates were not reloaded: %s", _why(error, self._files))
            self._bad = stamp
            return
        self._stamp, self._bad = stamp, None
        log.warning("TLS certificates were reloaded: %s", self._files.cert or self._files.ca)


def _why(error: OSError, files: TlsFiles) -> str:
    names = ", ".join(str(path) for path in (files.cert, files.key, files.ca) if path is not None)
    return f"{error.strerror or error} ({names})"


def listener_certificates(files: TlsFiles) -> Certificates:
    """Return the certificates of a listener; with `ca`, clients need one too. Raises BadRequest."""
    return Certificates(files, _listener_context)


def client_certificates() -> Certificates:
    """Return the certificates of a client; without `ca` it trusts the system's. Raises
    BadRequest.
    """
    return Certificates(_of_clients or _from_environment(), _client_context)


_of_clients: TlsFiles | None = None


def use_for_clients(files: TlsFiles | None) -> None:
    """Use these files for every client that this process makes from now on; None for the default,
    the files that the environment names. Raises BadRequest if only one of certificate and key is
    set.
    """
    global _of_clients
    if files is not None:
        files.check()
    _of_clients = files


def _from_environment() -> TlsFiles:
    names = {"ca": "LOCKSTEP_TLS_CA", "cert": "LOCKSTEP_TLS_CERT", "key": "LOCKSTEP_TLS_KEY"}
    values = {part: os.environ.get(name) for part, name in names.items()}
    files = TlsFiles(**{part: Path(value) for part, value in values.items() if value})
    files.check()
    return files


def _listener_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files.load_into(context)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    if files.ca is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
    files.load_into(context)
    return context
