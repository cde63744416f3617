"""TLS of listeners and of the client: certificates made here, mutual TLS, and files that change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import pytest
import trustme

import lockstep
from lockstep.http import tls
from lockstep.http.client.client import HttpClient
from lockstep.http.server.limits import ServerLimits
from lockstep.http.server.server import Endpoint, listen, serving, url_of
from lockstep.http.tls import ListenerTls, TlsFiles
from lockstep.tokens.errors import BadRequest, Unavailable
from tests.http.peer import Handlers, Peer, application

LIMITS = ServerLimits(
    sweep_seconds=0.02, head_seconds=0.3, progress_seconds=0.3, linger_seconds=0.1
)


@dataclass(frozen=True)
class Party:
    """A certificate with its key, and the authority that vouches for it, in files."""

    files: TlsFiles

    @classmethod
    def made(cls, directory: Path, name: str, authority: trustme.CA) -> Party:
        directory.mkdir(exist_ok=True)
        files = TlsFiles(
            cert=directory / f"{name}.pem", key=directory / f"{name}.key", ca=directory / "ca.pem"
        )
        issued = authority.issue_cert("127.0.0.1", "localhost", common_name=name)
        write(files, issued)
        authority.cert_pem.write_to_path(files.ca)
        return cls(files)


def write(files: TlsFiles, issued: trustme.LeafCert) -> None:
    pem = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    files.cert.write_bytes(pem)
    issued.private_key_pem.write_to_path(files.key)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server(tmp_path: Path, authority: trustme.CA) -> Party:
    return Party.made(tmp_path, "server", authority)


@pytest.fixture(autouse=True)
def clients_as_they_were() -> Iterator[None]:
    yield
    tls.use_for_clients(None)


@asynccontextmanager
async def secured(files: TlsFiles) -> AsyncIterator[str]:
    with listen("127.0.0.1", 0) as sock:
        async with serving(
            [Endpoint(application(Handlers()), sock, files)], limits=LIMITS, drain_seconds=1
        ):
            yield url_of(sock, files)


async def echoed(url: str) -> bytes:
    client = HttpClient(url, retries=0)
    try:
        return bytes(await client.post("/echo", b"hello", timeout=10))
    finally:
        await client.close()


async def serial(url: str, files: TlsFiles) -> int:
    """The serial number of the certificate that the server shows now."""
    context = ssl.create_default_context(cafile=files.ca)
    host, _, port = url.removeprefix("https://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return int(shown, 16)


async def test_a_client_that_trusts_the_authority_is_served(server: Party) -> None:
    async with secured(TlsFiles(cert=server.files.cert, key=server.files.key)) as url:
        tls.use_for_clients(TlsFiles(ca=server.files.ca))
        assert url.startswith("https://127.0.0.1:")
        assert await echoed(url) == b"hello"


async def test_a_client_trusts_what_the_environment_names_unless_its_program_chose(
    server: Party, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Party.made(tmp_path / "other", "other", trustme.CA())
    async with secured(TlsFiles(cert=server.files.cert, key=server.files.key)) as url:
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await echoed(url)
        monkeypatch.setenv("LOCKSTEP_TLS_CA", str(server.files.ca))
        assert await echoed(url) == b"hello"
        tls.use_for_clients(TlsFiles(ca=other.files.ca))
        lockstep.connect_fleet(url, token="a-token")  # which must not change it back
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await echoed(url)


async def test_a_certificate_without_its_key_is_named(
    server: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TLS_CERT", str(server.files.cert))
    with pytest.raises(BadRequest, match=r"the certificate \S+ and no key"):
        await echoed("https://127.0.0.1:9")


async def test_a_client_of_another_authority_does_not_talk(server: Party, tmp_path: Path) -> None:
    other = Party.made(tmp_path / "other", "other", trustme.CA())
    async with secured(TlsFiles(cert=server.files.cert, key=server.files.key)) as url:
        tls.use_for_clients(TlsFiles(ca=other.files.ca))
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await echoed(url)


async def test_a_server_with_client_certificates_serves_nobody_without_one(
    server: Party, authority: trustme.CA, tmp_path: Path
) -> None:
    known = Party.made(tmp_path / "known", "known", authority)
    stranger = Party.made(tmp_path / "stranger", "stranger", trustme.CA())
    async with secured(server.files) as url:
        for files in (
            TlsFiles(ca=server.files.ca),
            TlsFiles(cert=stranger.files.cert, key=stranger.files.key, ca=server.files.ca),
        ):
            tls.use_for_clients(files)
            with pytest.raises(Unavailable):
                await echoed(url)
        tls.use_for_clients(known.files)
        assert await echoed(url) == b"hello"


async def test_a_certificate_that_changes_is_read_again_and_a_broken_one_is_not_served(
    server: Party, authority: trustme.CA, caplog: pytest.LogCaptureFixture
) -> None:
    files = TlsFiles(cert=server.files.cert, key=server.files.key)
    async with secured(files) as url:
        before = await serial(url, server.files)
        kept = server.files.key.read_bytes()
        server.files.key.write_bytes(b"nonsense")
        await asyncio.sleep(0.2)
        assert await serial(url, server.files) == before
        assert caplog.text.count("TLS certificates were not reloaded") == 1
        server.files.key.write_bytes(kept)
        write(server.files, authority.issue_cert("127.0.0.1"))
        until = monotonic() + 5
        while await serial(url, server.files) == before and monotonic() < until:
            await asyncio.sleep(0.02)
        assert await serial(url, server.files) != before


async def test_a_client_reads_changed_certificates_too(
    server: Party, authority: trustme.CA, tmp_path: Path
) -> None:
    known = Party.made(tmp_path / "known", "known", trustme.CA())
    known.files.ca.write_bytes(server.files.ca.read_bytes())
    async with secured(server.files) as url:
        tls.use_for_clients(known.files)
        client = HttpClient(url, retries=0)
        with pytest.raises(Unavailable):
            await client.post("/echo", b"hello")
        write(known.files, authority.issue_cert("127.0.0.1", common_name="known"))
        assert await client.post("/echo", b"hello") == b"hello"
        await client.close()


async def test_a_handshake_has_a_deadline(server: Party) -> None:
    async with secured(TlsFiles(cert=server.files.cert, key=server.files.key)) as url:
        host, _, port = url.removeprefix("https://").partition(":")
        peer = Peer(*await asyncio.open_connection(host, int(port)))
        begun = monotonic()
        assert await peer.cut(10)
        assert monotonic() - begun < 5
        peer.writer.close()


async def test_over_tls_refusals_and_deadlines_are_the_same(server: Party) -> None:
    files = TlsFiles(cert=server.files.cert, key=server.files.key)
    context = ssl.create_default_context(cafile=server.files.ca)
    async with secured(files) as url:
        host, _, port = url.removeprefix("https://").partition(":")

        async def answer(sent: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(sent)
            try:
                return await asyncio.wait_for(reader.read(), 10)
            finally:
                writer.close()

        assert (await answer(b"nonsense\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        assert (await answer(b"GET /echo HTTP/1.1\r\nx-slow: ")).startswith(b"HTTP/1.1 408 ")
        closing = (
            b"POST /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"
        )
        assert (await answer(closing)).endswith(b"\r\n\r\nhi")


def test_files_that_cannot_be_used_are_named_at_the_start(server: Party, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(BadRequest, match=r"missing\.pem"):
        tls.listener_certificates(TlsFiles(cert=missing, key=server.files.key))
    with pytest.raises(BadRequest, match="together"):
        ListenerTls(tls_cert=server.files.cert).files()
    with pytest.raises(BadRequest, match="--tls-client-ca needs"):
        ListenerTls(tls_client_ca=server.files.ca).files()
    assert ListenerTls().files() is None
