"""Two gateways over the same real workers: the later one is obeyed, the other one stops leading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import time

import pytest

from lockstep.backends.admin import Source
from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.protocol.control.generations import Generations
from lockstep.storage.desired_state import Desired
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import Conflict, LockstepError, Superseded
from tests.fleet.fakes import until
from tests.fleet.live_fleet import SEQUENCES, Checkpoints, Workers, live, running
from tests.processes import TOKEN


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


async def held(workers: Workers) -> set[str]:
    views = [await worker.control("liveness_probe") for worker in workers.processes]
    return {view["version"] for _, view in views}


@pytest.mark.failure_mode("F61")
async def test_a_replaced_gateway_changes_nothing_any_more(
    workers: Workers, made: Checkpoints
) -> None:
    async with (
        live(workers, made, count=2) as old,
        live(workers, made, count=2, reset=False) as new,
    ):
        await new.update("a")
        for call in (old.update("b"), old.fleet.pause("keep"), old.fleet.flush()):
            with pytest.raises(LockstepError):
                await call
        await until(lambda: not old.serving())
        assert await held(workers) == {"a"}
        reasons = [str(worker.reason) for worker in old.pool.workers]
        assert all("another gateway" in reason for reason in reasons), reasons
        # It is tried again and again, and never comes back; the new one goes on as if nothing was.
        for worker in old.pool.workers:
            old.pool.check(worker.id)
        await until(lambda: all(worker.failures > 3 for worker in old.pool.workers))
        assert old.serving() == []
        await new.update("b")
        assert await new.check() == "b"
        assert new.serving() == [0, 1]


@pytest.mark.failure_mode("F62")
async def test_the_late_commit_of_a_replaced_gateway_is_refused(
    workers: Workers, made: Checkpoints
) -> None:
    await workers.reset(made.paths["default"])
    url = workers.processes[0].system_url
    old, new = LockstepAdmin(url, TOKEN), LockstepAdmin(url, TOKEN)
    first = (await old.view()).generation
    old.fence(lambda: first + 1, "old")
    new.fence(lambda: first + 2, "new")
    await old.stage(Source(directory=made.paths["a"]), "a")
    proof = (await old.probe_staged(SEQUENCES)).proof
    await new.resume()
    assert (await old.view()).generation == first + 2
    for call in (
        old.commit_proved("a", proof), old.commit("a"), old.rollback(), old.pause("keep"),
        old.resume(), old.flush(), old.stage(Source(directory=made.paths["b"]), "b"),
        old.load_adapter("x", made.paths["a"]), old.unload_adapter("x"),
    ):  # fmt: skip
        with pytest.raises(Superseded, match=f"generation {first + 2} of new was obeyed since"):
            await call
    await new.commit_proved("a", proof)
    assert (await old.view()).version == "a"  # reading needs no generation
    await old.close()
    await new.close()


@pytest.mark.failure_mode("F61")
async def test_the_generation_rises_with_every_start_and_above_what_workers_have_obeyed(
    workers: Workers, made: Checkpoints, tmp_path: Path
) -> None:
    where = str(tmp_path / "state.sqlite")
    numbers = []
    for _ in range(2):
        async with live(workers, made, count=2, store=SqliteControlStore(where)) as fleet:
            numbers.append(fleet.fleet.desired.generation)
    assert numbers[0] < numbers[1]
    ahead = int((time() + 3600) * 1000)  # a gateway whose clock was ahead was here before
    for worker in workers.processes:
        await worker.control("resume_generation", generation=ahead)
    async with live(workers, made, count=2, reset=False) as fleet:
        assert fleet.fleet.desired.generation > ahead
        assert fleet.serving() == [0, 1]
    store = SqliteControlStore(where)
    await store.save(Desired(generation=ahead + 100))
    async with live(workers, made, count=2, reset=False, store=store) as fleet:
        assert fleet.fleet.desired.generation == ahead + 101
        assert fleet.serving() == [0, 1]


@pytest.mark.failure_mode("F61")
async def test_two_gateways_that_take_the_same_number_are_not_both_obeyed(
    workers: Workers, made: Checkpoints, tmp_path: Path
) -> None:
    # The first one's clock was ten years ahead when it stored its number; the second one has
    # another store and rose above it; the first one is restarted and takes the next number.
    ahead = int((time() + 10 * 365 * 86_400) * 1000)
    first = SqliteControlStore(str(tmp_path / "first.sqlite"))
    await first.save(Desired(generation=ahead))
    for worker in workers.processes:
        await worker.control("resume_generation", generation=ahead)
    async with live(workers, made, count=2, reset=False) as second:
        assert second.fleet.desired.generation == ahead + 1
        async with live(workers, made, count=2, reset=False, store=first) as restarted:
            assert restarted.fleet.desired.generation > ahead + 1
            await restarted.update("a")
            with pytest.raises(LockstepError):
                await second.update("b")
            assert await held(workers) == {"a"}
            assert restarted.serving() == [0, 1]


@pytest.mark.failure_mode("F61")
async def test_a_worker_obeys_one_gateway_for_one_number(workers: Workers) -> None:
    url = workers.processes[0].system_url
    mine, other = LockstepAdmin(url, TOKEN), LockstepAdmin(url, TOKEN)
    number = (await mine.view()).generation + 1
    mine.fence(lambda: number, "mine")
    other.fence(lambda: number, "other")
    await mine.resume()
    await mine.resume()
    view = await other.view()
    assert (view.generation, view.gateway) == (number, "mine")
    with pytest.raises(Superseded, match=f"generation {number} of mine was obeyed"):
        await other.resume()
    await mine.close()
    await other.close()


def test_the_same_generation_is_obeyed_again_and_commands_without_one_are_never_refused() -> None:
    generations = Generations()
    for number in (0, 3, 3, None, 4):
        generations.check(number)
    with pytest.raises(Superseded):
        generations.check(3)
    assert (generations.highest, generations.gateway) == (4, None)


def test_a_number_obeyed_without_a_gateway_is_not_that_of_a_named_one() -> None:
    generations = Generations()
    generations.check(4)  # from a gateway of a release without identities
    with pytest.raises(Superseded):
        generations.check(4, "new")
    generations.check(5, "new")
    with pytest.raises(Superseded):
        generations.check(5)
    generations.check(5, "new")


async def test_an_adapter_cannot_have_the_name_of_the_model(
    workers: Workers, made: Checkpoints
) -> None:
    worker = workers.processes[0]
    status, body = await worker.control("load_lora_adapter", lora_name="tiny", lora_path="/tmp")
    assert (status, "name of the model" in body["error"]["message"]) == (409, True)
    async with live(workers, made, count=2) as fleet:
        with pytest.raises(Conflict, match="'tiny', which is the name of the model"):
            await fleet.fleet.load_adapter("tiny", str(made.paths["a"]))
        assert fleet.serving() == [0, 1]
