"""What tracing costs a gateway: CPU per request with it on, beside the same gateway without.

    python -m benchmarks.tracing [--rounds 5]

The spans go to a collector that takes them at once, on another core; sending them is part of the
gateway's cost, as it is a thread of its process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from benchmarks import table
from benchmarks.gateway.bench import ROUNDS, bench
from benchmarks.gateway.contestants import CONTESTANTS, Contestant, Place, Server, lockstep
from benchmarks.gateway.traffic import CASES
from benchmarks.table import Row

OFF, ON, SAMPLED = "lockstep", "traced", "traced-1-percent"
MEASURED = ("2k", "2k-sessions", "stream-sessions")
FEW = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def collector() -> Iterator[str]:
    """The URL of a collector that takes everything and keeps nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def traced(place: Place, owner: str, *, url: str, environ: Mapping[str, str]) -> Server:
    return lockstep(place, owner, "--trace", OTEL_EXPORTER_OTLP_ENDPOINT=url, **environ)


def rows(rounds: int) -> list[Row]:
    measured: list[Row] = []
    with collector() as url:
        CONTESTANTS[ON] = Contestant(partial(traced, url=url, environ={}), "vllm")
        CONTESTANTS[SAMPLED] = Contestant(partial(traced, url=url, environ=FEW), "vllm")
        with bench((OFF, ON, SAMPLED), MEASURED) as started:
            for name in MEASURED:
                costs = started.costs(name, rounds)
                measured += [
                    Row(
                        what=f"{_what(name)}, {how}",
                        against="tracing off",
                        ours=costs[entry],
                        theirs=costs[OFF],
                        unit="ms CPU",
                        note=note,
                    )
                    for entry, how, note in (
                        (ON, "every request traced", "OTLP over HTTP, sent by a thread"),
                        (SAMPLED, "1 % traced", "parentbased_traceidratio"),
                    )
                ]
    return measured


def _what(name: str) -> str:
    case = CASES[name]
    sessions = "on" if case.turns else "off"
    streamed = " streamed" if case.stream else ""
    return f"{case.prompt:,} tokens in, {case.out} out{streamed}, sessions {sessions}"


if __name__ == "__main__":
    table.main(rows, __doc__, rounds=ROUNDS)
