"""More samplers than slots: every sample completes, and no slot is used twice."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.fleet.fleet import Fleet
from lockstep.integrations.tinker.samplers import Samplers
from lockstep.integrations.tinker.tinker_store import SamplerRecord, TinkerStore, now
from lockstep.storage.desired_state import AdapterSpec, Desired
from lockstep.tokens import Completion, Sampling, VersionSpan
from lockstep.tokens.completion import Finish
from lockstep.tokens.errors import Busy, Conflict, NotFound, RolloutFailed, UnknownModel

SLOTS = 3


class FewSlots:
    """A fleet that rejects too many adapters and concurrent changes of one name, as a real one."""

    def __init__(self, finish: Finish = "stop") -> None:
        self.loaded: set[str] = set()
        self.changing: set[str] = set()
        self.slow: set[str | None] = set()
        self.loads = 0
        self.finish = finish
        self.pool = self
        self.others: list[str] = []
        self.paths: dict[str, str] = {}
        self.checkpoint: str | None = None

    @property
    def desired(self) -> Desired:
        held = (*self.loaded, *self.others)
        specs = {name: AdapterSpec(self.paths.get(name, ""), "label") for name in held}
        return Desired(adapters=specs, checkpoint=self.checkpoint)

    async def load_adapter(self, name: str, path: str, *, version: str | None) -> None:
        await self._change(name)
        if len(self.loaded) + len(self.others) >= SLOTS:
            raise Busy("too many adapters")
        self.loaded.add(name)
        self.paths[name] = path
        self.loads += 1

    async def unload_adapter(self, name: str) -> None:
        await self._change(name)
        self.loaded.remove(name)

    async def _change(self, name: str) -> None:
        if name in self.changing:
            raise Conflict("another operation on this adapter is under way")
        self.changing.add(name)
        await asyncio.sleep(0.05 if name in self.slow else random.random() / 500)
        self.changing.remove(name)

    async def run(self, affinity: Any, call: Any, request: Any = None) -> Any:
        return await call(self)

    async def generate(self, request: Any) -> list[Completion]:
        for _ in range(2):
            if request.model != "tiny" and request.model not in self.loaded:
                raise UnknownModel(f"{request.model} is not loaded")
            await asyncio.sleep(random.random() / 500)
        return [
            Completion(
                token_ids=[1], logprobs=[-1.0], prompt_ids=[1], finish=self.finish,
                versions=(VersionSpan("v", 0, 1),), adapter=request.model,
            )
        ]  # fmt: skip


class Named:
    """Samplers of a store, by their ids."""

    def __init__(self, store: TinkerStore, samplers: Samplers) -> None:
        self.samplers = samplers
        self.find = store.sampler

    async def sample(self, name: str, prompt_ids: list[int], sampling: Sampling) -> Any:
        return await self.samplers.sample(self.find(name), prompt_ids, sampling)


def made(tmp_path: Path, fleet: FewSlots) -> Named:
    store = TinkerStore(tmp_path)
    for number in range(12):
        with store.writing_ephemeral(f"s{number}") as directory:
            (directory / "adapter_model.safetensors").write_bytes(b"")
        where = str(store.ephemeral(f"s{number}"))
        store.put_sampler(
            SamplerRecord(
                sampler_id=f"s{number}", base_model="tiny", created=now(), directory=where
            )
        )
    return Named(store, Samplers(cast("Fleet", fleet), "tiny", SLOTS))


@pytest.mark.failure_mode("F82")
async def test_every_sample_completes_under_concurrent_loads_and_cancellations(
    tmp_path: Path,
) -> None:
    fleet = FewSlots()
    samplers = made(tmp_path, fleet)
    chosen = random.Random(1)
    for _ in range(3):
        tasks = [
            asyncio.create_task(samplers.sample(f"s{chosen.randrange(12)}", [1], Sampling()))
            for _ in range(100)
        ]
        for task in tasks[::5]:
            await asyncio.sleep(0.0005)
            task.cancel()
        async with asyncio.timeout(30):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in results if isinstance(each, Exception)] == []
    assert fleet.loads > 12
    again = await samplers.sample("s0", [1], Sampling())
    assert again[0].adapter in fleet.loaded


async def test_a_sampler_requested_during_its_eviction_is_loaded_again(tmp_path: Path) -> None:
    fleet = FewSlots()
    samplers = made(tmp_path, fleet)
    for number in range(SLOTS):
        (one,) = await samplers.sample(f"s{number}", [1], Sampling())
        fleet.slow |= {one.adapter} if number == 0 else set()
    later = asyncio.create_task(samplers.sample("s3", [1], Sampling()))
    while not fleet.changing:
        await asyncio.sleep(0)
    (back,) = await samplers.sample("s0", [1], Sampling())
    await later
    assert back.adapter in fleet.loaded


async def test_a_sampler_in_use_is_not_evicted(tmp_path: Path) -> None:
    fleet = FewSlots()
    samplers = made(tmp_path, fleet)
    first = await samplers.sample("s0", [1], Sampling())
    for _ in range(4):
        for number in (1, 2):
            await samplers.sample(f"s{number}", [1], Sampling())
        await samplers.sample("s0", [1], Sampling())
    assert fleet.loads == 3
    assert first[0].adapter in fleet.loaded


@pytest.mark.failure_mode("F12")
async def test_an_aborted_sample_is_an_error(tmp_path: Path) -> None:
    samplers = made(tmp_path, FewSlots(finish="abort"))
    with pytest.raises(RolloutFailed, match="was aborted after 1 tokens"):
        await samplers.sample("s0", [1], Sampling())


async def test_deleted_weights_are_an_error(tmp_path: Path) -> None:
    samplers = made(tmp_path, FewSlots())
    (Path(samplers.find("s3").directory or "") / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFound, match="were deleted"):
        await samplers.sample("s3", [1], Sampling())


async def test_adapters_of_an_operator_keep_their_slots(tmp_path: Path) -> None:
    fleet = FewSlots()
    fleet.others = ["mine"]
    samplers = made(tmp_path, fleet)
    for number in range(4):
        await samplers.sample(f"s{number}", [1], Sampling())
    assert len(fleet.loaded) == SLOTS - 1
    fleet.others = ["mine", "his", "hers"]
    with pytest.raises(Conflict, match="3 adapters of an operator use all slots"):
        await samplers.sample("s5", [1], Sampling())


async def test_a_sampler_that_an_operator_unloaded_is_loaded_again(tmp_path: Path) -> None:
    fleet = FewSlots()
    samplers = made(tmp_path, fleet)
    (first,) = await samplers.sample("s0", [1], Sampling())
    fleet.loaded.remove(first.adapter or "")
    (again,) = await samplers.sample("s0", [1], Sampling())
    assert again.adapter == first.adapter
    assert fleet.loads == 2


async def test_weights_are_unloaded_before_they_are_deleted(tmp_path: Path) -> None:
    fleet = FewSlots()
    samplers = made(tmp_path, fleet)
    using = asyncio.create_task(samplers.sample("s0", [1], Sampling()))
    while not fleet.loaded:
        await asyncio.sleep(0)
    await samplers.samplers.forget(Path(samplers.find("s0").directory or ""))
    assert fleet.loaded == set()
    with suppress(UnknownModel):
        await using
    for number in range(4):
        await samplers.sample(f"s{number}", [1], Sampling())


@pytest.mark.failure_mode("F85")
async def test_a_sample_of_another_base_model_is_an_error(tmp_path: Path) -> None:
    fleet = FewSlots()
    samplers = made(tmp_path, fleet)
    fleet.checkpoint = "/checkpoints/step-1"
    with pytest.raises(Conflict, match="trained on the weights it was started with"):
        await samplers.sample("s0", [1], Sampling())


async def test_adapters_of_an_earlier_process_are_adopted(tmp_path: Path) -> None:
    fleet = FewSlots()
    before = made(tmp_path, fleet)
    for number in range(SLOTS):
        await before.sample(f"s{number}", [1], Sampling())
    (Path(before.find("s2").directory or "") / "adapter_model.safetensors").unlink()
    after = Named(TinkerStore(tmp_path), Samplers(cast("Fleet", fleet), "tiny", SLOTS))
    await after.samplers.adopt()
    assert len(fleet.loaded) == SLOTS - 1, "deleted weights are held by no worker"
    await after.sample("s0", [1], Sampling())
    assert fleet.loads == SLOTS, "what is loaded is not loaded again"
    for number in range(3, 7):
        await after.sample(f"s{number}", [1], Sampling())
    fleet.loaded.add("mine")
    await after.samplers.close()
    assert fleet.loaded == {"mine"}
