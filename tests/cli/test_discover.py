"""`lockstep gateway --discover`: workers come and go with the addresses of a host name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from lockstep.cli.serving import dns_workers
from lockstep.cli.serving.dns_workers import DnsWorkers
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool
from lockstep.tokens.errors import BadRequest
from tests.cli.test_late_workers import GATEWAY, worker_arguments
from tests.deploy.files import DEPLOY
from tests.fleet.fakes import FakeWorker, until
from tests.ports import free_port
from tests.processes import TOKEN, ready_process

WORKER_TOKEN = "token-of-the-workers"


async def test_workers_join_and_leave_with_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"127.0.0.1"}

    async def look_up(_: DnsWorkers) -> set[str]:
        return set(addresses)

    monkeypatch.setattr(dns_workers, "LOOKUP_SECONDS", 0.02)
    monkeypatch.setattr(DnsWorkers, "_addresses", look_up)
    fake = FakeWorker("w0")
    await fake.start()
    pool = Pool(probe_seconds=0.05)
    source = DnsWorkers.parse(f"http://workers:{fake.port}", worker_options={}, wait_seconds=30.0)

    def present() -> set[str]:
        return {worker.url for worker in pool.workers}

    first, second = fake.url, f"http://127.0.0.2:{fake.port}"
    async with source.joined(Fleet(pool), TOKEN, lambda _: None) as rows:
        assert [row["url"] for row in rows] == [first]
        by_hand = await pool.add("http://127.0.0.3:9")  # another port: not of this name
        addresses.add("127.0.0.2")
        await until(lambda: present() == {first, second, by_hand.url})
        addresses.clear()  # a look-up that fails removes no worker
        lookups = 0

        async def count(_: DnsWorkers) -> set[str]:
            nonlocal lookups
            lookups += 1
            return set(addresses)

        monkeypatch.setattr(DnsWorkers, "_addresses", count)
        await until(lambda: lookups > 5)
        assert present() == {first, second, by_hand.url}
        addresses.add("127.0.0.1")
        await until(lambda: present() == {first, by_hand.url})
    await fake.die()


@pytest.mark.parametrize("value", ["http://workers", "http://a:1,http://b:2"])
def test_a_name_without_a_port_or_two_names_are_refused(value: str) -> None:
    with pytest.raises(BadRequest, match="with one name for both"):
        DnsWorkers.parse(value, worker_options={}, wait_seconds=1.0)


async def test_workers_have_a_token_of_their_own_that_opens_nothing_of_the_gateway(
    tmp_path: Path,
) -> None:
    data, system = free_port(), free_port()
    with (
        ready_process(*worker_arguments(tmp_path, data, system), token=WORKER_TOKEN),
        ready_process(
            *GATEWAY,
            "--discover", f"http://localhost:{data},http://localhost:{system}",
            LOCKSTEP_WORKER_ADMIN_TOKEN=WORKER_TOKEN,
        ) as gateway,
    ):  # fmt: skip
        worker = f"127.0.0.1:{data}"
        assert [row["id"] for row in gateway["workers"]] == [worker]
        admin = f"{gateway['admin_url']}/v1/rl"
        async with aiohttp.ClientSession(
            headers={"authorization": f"Bearer {WORKER_TOKEN}"}
        ) as http:
            for path in ("state", "workers", "workers/x/ready/../../state"):
                async with http.get(f"{admin}/{path}") as answer:
                    assert answer.status == 401, path
            async with http.post(f"{admin}/workers/{worker}/ready") as answer:
                assert answer.status == 401
        probe = subprocess.run(  # noqa: ASYNC221 (nothing else runs)
            [sys.executable, DEPLOY / "ready.py", worker],
            env={**os.environ, "LOCKSTEP_ADMIN_URL": gateway["admin_url"],
                 "LOCKSTEP_ADMIN_TOKEN": WORKER_TOKEN},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (probe.returncode, probe.stderr) == (0, "")
