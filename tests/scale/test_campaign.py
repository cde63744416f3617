"""A campaign of kills under load; `make test-scale SECONDS=120` runs it for longer."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.faults.traffic import Reference
from tests.scale.campaign.campaign import FAILOVER_SECONDS, Campaign
from tests.scale.campaign.deployment import Deployment
from tests.scale.campaign.link import Link

SEED = 7


@pytest.mark.timeout(900)
@pytest.mark.failure_mode("F61")
async def test_nothing_answered_is_lost_or_mislabelled_whoever_is_killed(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CAMPAIGN_SECONDS", "20"))
    reference = Reference(tmp_path)
    async with Deployment() as deployment:
        campaign = Campaign(deployment, reference, random.Random(SEED))
        await campaign.run(seconds)
    print(campaign.report())
    assert campaign.wrong == []
    assert len(campaign.harms) == 9
    assert min(campaign.answers, campaign.turns) > 50
    assert max(campaign.failovers) < FAILOVER_SECONDS
    assert campaign.cuts.keys() == {"reset", "silent"}


async def test_a_link_that_is_cut_carries_nothing_until_it_is_joined() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Link(server.sockets[0].getsockname()[1]) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"whole")
        assert await reader.read(100) == b"whole"
        link.cut("silent")
        writer.write(b"late")
        arriving = asyncio.create_task(reader.read(100))
        await asyncio.sleep(0.1)
        assert not arriving.done()
        link.join()
        assert await asyncio.wait_for(arriving, 5) == b"late"
        link.cut("reset")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.readexactly(1), 5)
        reader, other = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.readexactly(1), 5)
        link.join()
        for each in (writer, other):
            each.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"again")
        assert await reader.read(100) == b"again"
        writer.close()
        assert await reader.read(100) == b""
