"""How a Dynamo deployment of several hosts is configured, and what is rejected before it starts."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.backends.dynamo.reachable import check_reachable, wait_until_reachable
from lockstep.protocol.dynamo import environment as dynamo_env
from lockstep.protocol.dynamo.environment import check_advertised, network_environ
from lockstep.tokens.errors import BadRequest, Unavailable
from tests.backends.scripted import serving, whole

HEALTHY = whole(b'{"health":"true","reason":""}')


def network(discovery: str | None = "etcd://e:2379", *others: str | None) -> dict[str, str]:
    return network_environ(discovery, *[*others, None, None, None][:3], environ={})


def test_command_line_options_become_dynamo_variables() -> None:
    assert network() == {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "ETCD_ENDPOINTS": "http://e:2379",
        "DYN_EVENT_PLANE": "zmq",
    }
    assert network("etcds://e1:1,e2:2")["ETCD_ENDPOINTS"] == "https://e1:1,https://e2:2"
    over_nats = network("etcd://e:2379", "nats://n:4222", "nats")
    assert over_nats["DYN_REQUEST_PLANE"] == over_nats["DYN_EVENT_PLANE"] == "nats"
    assert over_nats["NATS_SERVER"] == "nats://n:4222"
    assert network("etcd://e:2379", "tcp")["DYN_REQUEST_PLANE"] == "tcp"
    hosts = network("etcd://e:2379", None, None, "127.0.0.1")
    assert {value for name, value in hosts.items() if name.endswith("_HOST")} == {"127.0.0.1"}
    assert network(None) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("http://e:2379",), "expected etcd://HOST:2379"),
        (("etcd://e",), "expected HOST:PORT"),
        (("etcd://e:x",), "expected HOST:PORT"),
        (("etcd://e:1,f",), "expected HOST:PORT"),
        (("etcd://e:1", "udp"), "expected tcp or nats://HOST:4222"),
        (("etcd://e:1", None, "nats"), "set NATS_SERVER"),
        (("etcd://e:1", None, None, "203.0.113.7"), "no address of this host"),
        ((None, None, None, "127.0.0.1"), "give --discovery"),
    ],
)
def test_contradictory_options_are_rejected(given: tuple[str | None, ...], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        network(*given)


@pytest.mark.parametrize(
    "given",
    [
        ("etcd://root:hunter2@e:2379",),
        ("http://root:hunter2@e:2379",),
        ("etcd://e:1", "nats://root:hunter2@n:4222"),
        ("etcd://e:1", "udp://root:hunter2@n:4222"),
    ],
)
def test_a_password_on_a_command_line_is_rejected_and_not_repeated(given: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest) as caught:
        network(*given)
    assert "hunter2" not in caught.value.message


def test_an_etcd_on_loopback_is_one_machine_and_others_are_not() -> None:
    near = dynamo_env.complete(network("etcd://127.0.0.1:2379"))
    assert {near[name] for name in dynamo_env.DATA_HOSTS} == {"127.0.0.1"}
    far = dynamo_env.complete(network("etcd://10.0.0.1:2379"))
    assert not set(dynamo_env.DATA_HOSTS) & set(far)


@pytest.mark.failure_mode("F72")
def test_an_address_that_others_cannot_reach_is_rejected_unless_it_was_set() -> None:
    far = dynamo_env.complete(network("etcd://192.0.2.1:2379"))
    with pytest.raises(BadRequest, match=r"would advertise 127.0.0.1.*give --advertise ADDRESS"):
        check_advertised(far, chosen=False)
    check_advertised(far, chosen=True)
    check_advertised({**far, "DYN_SYSTEM_HOST": "10.0.0.2"}, chosen=False)
    check_advertised(dynamo_env.complete(network("etcd://localhost:2379")), chosen=False)
    check_advertised(dynamo_env.complete({}), chosen=False)


async def test_the_error_names_a_server_that_refuses_or_has_no_address() -> None:
    with pytest.raises(
        Unavailable, match=r"\(127\.0\.0\.1:9: Connection refused; nobody\.invalid:1: "
    ):
        await check_reachable(network("etcd://127.0.0.1:9,nobody.invalid:1"))


async def test_etcd_is_reachable_when_one_of_the_listed_servers_is_healthy() -> None:
    async with serving(lambda _: HEALTHY) as server:
        environ = network(f"etcd://127.0.0.1:9,127.0.0.1:{server.url.rpartition(':')[2]}")
        await check_reachable(environ)
        assert [request.path for request in server.requests] == ["/health"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (whole(b'{"health":"false"}'), "not healthy"),
        (whole(b"hello"), "not etcd"),
        (whole({"detail": "Not Found"}, 404), "not etcd"),
    ],
)
async def test_a_server_that_is_not_a_working_etcd_is_an_error(reply, message: str) -> None:
    async with serving(lambda _: reply) as server:
        with pytest.raises(Unavailable, match=message):
            await check_reachable(network(f"etcd://127.0.0.1:{server.url.rpartition(':')[2]}"))


async def test_nats_is_recognised_by_its_greeting_and_its_password_is_not_repeated() -> None:
    greeting = [b'INFO {"server_id":"x"}\r\n']

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting[0])
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    environ = {"DYN_REQUEST_PLANE": "nats", "NATS_SERVER": f"nats://u:hunter2@127.0.0.1:{port}"}
    async with server:
        await check_reachable(environ)
        greeting[0] = b"SSH-2.0-OpenSSH\r\n"
        with pytest.raises(Unavailable, match=rf"127\.0\.0\.1:{port}: the server there is not"):
            await check_reachable(environ)
    with pytest.raises(Unavailable, match="NATS cannot be reached") as caught:
        await check_reachable(environ)
    assert "hunter2" not in caught.value.message


async def test_a_silent_server_times_out() -> None:
    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(5)
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        for environ in (
            network(f"etcd://127.0.0.1:{port}"),
            {"DYN_EVENT_PLANE": "nats", "NATS_SERVER": f"nats://127.0.0.1:{port}"},
        ):
            with pytest.raises(Unavailable, match=r"no response within 0\.2 s"):
                await check_reachable(environ, 0.2)


async def test_waiting_ends_when_the_server_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.backends.dynamo.reachable.WAIT_SECONDS", 0.01)
    replies = iter((whole(b'{"health":"false"}'),))
    async with serving(lambda _: next(replies, HEALTHY)) as server:
        async with asyncio.timeout(10):
            await wait_until_reachable(network(f"etcd://127.0.0.1:{server.url.rpartition(':')[2]}"))
        assert len(server.requests) == 2
