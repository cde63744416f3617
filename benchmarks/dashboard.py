"""What the dashboard costs a gateway: CPU with no page open, with one, and with five.

    python -m benchmarks.dashboard [--rounds 5]

Pages cost by the second and not by the request: the stream looks at the gateway twice a second,
once for all pages. So a second of it is measured beside 1,000 requests, on a gateway that serves a
little traffic meanwhile, or there would be nothing new to send.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import table
from benchmarks.gateway.bench import ROUNDS, Bench, bench
from benchmarks.gateway.contestants import (
    CONTESTANTS,
    Contestant,
    Place,
    Server,
    free_port,
    lockstep,
)
from benchmarks.table import Row

NAME, CASE = "watched", "2k"
TOKEN = "benchmark-admin-token"
PAGES = (0, 1, 5)
SECONDS, RATE = 6.0, 20.0


class _Pages:
    """Pages that read the event stream of a gateway, as browsers do."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/dashboard/events"
        self.events = 0

    @contextmanager
    def open(self, count: int) -> Iterator[None]:
        stop = threading.Event()
        pages = [threading.Thread(target=self._read, args=(stop,)) for _ in range(count)]
        for page in pages:
            page.start()
        try:
            yield
        finally:
            stop.set()
            for page in pages:
                page.join()

    def _read(self, stop: threading.Event) -> None:
        request = urllib.request.Request(self._url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as stream:
            while not stop.is_set():
                self.events += stream.readline().startswith(b"data:")


@contextmanager
def _traffic(port: int, body: bytes) -> Iterator[None]:
    """A few requests a second, whatever else happens."""
    stop = threading.Event()

    def send() -> None:
        url = f"http://127.0.0.1:{port}/inference/v1/generate"
        while not stop.wait(1 / RATE):
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=10).read()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _second(server: Server, pages: _Pages, count: int) -> float:
    """Milliseconds of CPU in a second with so many pages."""
    with pages.open(count):
        time.sleep(1.0)
        before, begun = server.cpu_seconds(), time.monotonic()
        time.sleep(SECONDS)
        return 1e3 * (server.cpu_seconds() - before) / (time.monotonic() - begun)


def measured(started: Bench, pages: _Pages, rounds: int) -> list[Row]:
    server = started.servers[NAME]
    request = started.costs(CASE, rounds)[NAME]
    body = json.dumps(
        {"token_ids": list(range(100, 200)), "sampling_params": {"max_tokens": 4}}
    ).encode()
    spent: dict[int, list[float]] = {count: [] for count in PAGES}
    with _traffic(server.port, body):
        for _ in range(rounds):
            for count in PAGES:
                spent[count].append(_second(server, pages, count))
    none = statistics.median(spent[0])
    return [
        Row(
            what=f"{count} page{'s' if count > 1 else ''} open, for a second",
            against="1,000 requests",
            ours=statistics.median(spent[count]) - none,
            theirs=1000 * request,
            unit="ms CPU",
            note=f"2,048 tokens in, 64 out, sessions off: {request:.3f} ms each; {how}",
        )
        for count, how in ((1, "one look for all, twice a second"), (5, "the same look"))
    ]


def rows(rounds: int) -> list[Row]:
    admin_port = free_port()

    def watched(place: Place, owner: str) -> Server:
        return lockstep(place, owner, "--admin-port", str(admin_port), LOCKSTEP_ADMIN_TOKEN=TOKEN)

    CONTESTANTS[NAME] = Contestant(watched, "vllm")
    with bench((NAME,), (CASE,)) as started:
        return measured(started, _Pages(admin_port), rounds)


if __name__ == "__main__":
    table.main(rows, __doc__, rounds=ROUNDS)
