"""VllmAdmin and PrimeAdmin against a server that replies with what vLLM 0.32 was seen to send."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends.admin import Broadcaster, Source, TensorSpec
from lockstep.backends.prime_rl.admin import PrimeAdmin
from lockstep.backends.registry import open_admin
from lockstep.backends.vllm import collective_rpc as rpc
from lockstep.backends.vllm.admin import VllmAdmin
from lockstep.tokens.errors import (
    AdapterError,
    BadRequest,
    CheckpointError,
    Conflict,
    ContractError,
    DeadlineExceeded,
    EngineFailure,
    LockstepError,
    Superseded,
    Unavailable,
    UnknownModel,
    UnsupportedField,
)
from tests.backends import scripted
from tests.backends.scripted import (
    QUICK,
    Reply,
    Request,
    ScriptedWorker,
    Server,
    serving,
    whole,
)

B = Source(directory=Path("/models/b"))
SPECS = [TensorSpec("model.norm.weight", "float32", (8,))]
captured = partial(scripted.captured, "vllm")


@dataclass
class Vllm(ScriptedWorker):
    """As much of a vLLM server as its admin driver can see."""

    paused: bool = False
    version: str = "default"
    weights: str = "start"
    loads: list[str] = field(default_factory=list)
    adapters: dict[str, str] = field(default_factory=dict)
    extension: bool = False
    probes: bool = False
    prime: bool = False
    dev: bool = True
    staged: str | None = None
    previous: str | None = None
    held: bool = False
    resets: list[str] = field(default_factory=list)

    def key(self, path: str, body: dict[str, Any]) -> str:
        return body.get("method") or path

    def respond(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Reply:
        if path == "/v1/models":
            cards = [{"id": "m", "owned_by": "vllm", "root": "/models/a", "max_model_len": 99}]
            cards += [
                {"id": name, "owned_by": "vllm", "root": root, "parent": "m"}
                for name, root in self.adapters.items()
            ]
            return whole({"object": "list", "data": cards})
        if path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            self.adapters[body["lora_name"]] = body["lora_path"]
            return whole({"status": "ok"}) if self.prime else captured("lora_load_inplace_v2")
        if path == "/v1/unload_lora_adapter":
            loaded = self.adapters.pop(body["lora_name"], None)
            return captured("lora_unload" if loaded else "lora_unload_again")
        if path == "/inference/v1/generate":
            rows = [None] + [{str(i): {"logprob": -float(i)}} for i in body["token_ids"][1:]]
            scored = {"content": [{"token": "token_id:1", "logprob": -1.0}]}
            choice = {"index": 0, "token_ids": [1], "finish_reason": "length", "logprobs": scored}
            return whole({"request_id": "x", "choices": [choice], "prompt_logprobs": rows})
        if self.prime and path in ("/pause", "/resume", "/liveness", "/init_broadcaster"):
            self.paused = path == "/pause"
            return whole({"status": "ok"})
        if self.prime and path == "/update_weights":
            self.loads.append(body["weight_dir"])
            return whole({"status": "ok"})
        if not self.dev:
            return whole({"detail": "Not Found"}, 404)
        return self.respond_dev(path, query, body)

    def respond_dev(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> Reply:
        if path == "/pause":
            self.paused = True
            return captured("rl_pause")
        if path == "/resume":
            self.paused = False
            return captured("rl_resume")
        if path == "/is_paused":
            return whole({"is_paused": self.paused})
        if path == "/weight_info":
            return whole({"weight_version": self.version})
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return whole({"success": True, "new_version": self.version})
        if path == "/reset_prefix_cache":
            self.resets.append(query.get("reset_running_requests", ["false"])[0])
            return whole({"success": not self.held or self.resets[-1] == "true"})
        if path == "/collective_rpc":
            return self.rpc(body["method"], body.get("kwargs", {}))
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        names = {"/start_weight_update": "wt_start", "/update_weights": "wt_update",
                 "/finish_weight_update": "wt_finish",
                 "/init_weight_transfer_engine": "wt_init"}  # fmt: skip
        return captured(names[path]) if path in names else whole({"detail": "Not Found"}, 404)

    def rpc(self, method: str, kwargs: dict[str, Any]) -> Reply:
        if method == "reload_weights":
            self.loads.append(kwargs["weights_path"])
            return captured("rl_reload_b")
        if not self.extension:
            return captured("rl_rpc_unknown")
        result: dict[str, Any] = {}
        if method == rpc.VIEW:
            result = {"version": self.weights, "staged": self.staged, "probes": self.probes}
        elif method == rpc.STAGE:
            self.staged = kwargs["weight_version"]
            result = {"staged": self.staged}
        elif method == rpc.COMMIT:
            if self.staged != kwargs["version"]:
                return whole({"error": {"message": "not staged", "code": 409}}, 409)
            self.previous, self.weights, self.staged = self.weights, self.staged, None
            result = {"version": self.weights}
        elif method == rpc.ROLLBACK:
            if self.staged is not None:
                self.staged = None
            else:
                self.weights, self.previous = self.previous or "lost", None
            result = {"version": self.weights}
        elif method == rpc.PROBE:
            result = {"logprobs": [[-1.0] * (len(ids) - 1) for ids in kwargs["token_ids"]]}
        return whole({"results": [result, result]})


def driver(server: Server) -> VllmAdmin:
    return VllmAdmin(server.url, budgets=QUICK, backoff=0.01)


# Without the extension


async def test_without_the_extension_commit_loads_labels_and_drops_prefixes() -> None:
    fake = Vllm(held=True)
    async with serving(fake.script) as server:
        admin = await open_admin(server.url, budgets=QUICK)
        assert (admin.name, admin.stages, admin.probes_while_paused) == ("vllm", False, False)
        await admin.stage(B, "B")
        assert ((await admin.view()).staged, fake.loads) == ("B", [])
        await admin.pause("keep")
        await admin.commit("B")
        assert (fake.loads, fake.version, fake.resets) == (["/models/b"], "B", ["false", "true"])
        view = await admin.view()
        assert (view.version, view.staged, view.paused) == ("B", None, True)
        assert await admin.rollback() == "default"
        assert (fake.loads[-1], fake.version) == ("/models/a", "default")
        await admin.resume()
        await admin.close()


async def test_weights_are_not_touched_while_the_server_runs() -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.stage(B, "B")
        with pytest.raises(Conflict, match="not paused"):
            await admin.commit("B")
        assert fake.loads == []
        with pytest.raises(Conflict, match="'B' is staged"):
            await admin.commit("C")
        assert await admin.rollback() == "default"
        with pytest.raises(Conflict, match="nothing to roll back"):
            await admin.rollback()
        await admin.close()


@pytest.mark.failure_mode("F35")
async def test_a_server_with_half_loaded_weights_is_not_resumed() -> None:
    fake = Vllm(replies={"reload_weights": [captured("rl_reload_missing")]})
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.pause("abort")
        await admin.stage(B, "B")
        with pytest.raises(EngineFailure, match="Repo id"):
            await admin.commit("B")
        with pytest.raises(Conflict, match="half-loaded"):
            await admin.resume()
        assert fake.paused
        assert await admin.rollback() == "default"
        assert fake.loads == ["/models/a"]
        await admin.resume()
        await admin.close()


@pytest.mark.failure_mode("F24")
async def test_a_rollback_that_failed_goes_back_to_the_same_weights_when_tried_again() -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.pause("abort")
        await admin.stage(B, "B")
        await admin.commit("B")
        fake.replies["reload_weights"] = [captured("rl_reload_missing")]
        with pytest.raises(EngineFailure):
            await admin.rollback()
        assert (await admin.view()).version is None, "a label says nothing of broken weights"
        assert await admin.rollback() == "default"
        assert fake.loads == ["/models/b", "/models/a"]
        assert (await admin.view()).version == "default"
        await admin.close()


@pytest.mark.failure_mode("F25")
async def test_a_reload_whose_response_is_lost_is_repeated_only_while_paused() -> None:
    fake = Vllm(replies={"reload_weights": [Reply(fault="reset")]})
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.pause("abort")
        await admin.stage(B, "B")
        await admin.commit("B")
        assert fake.loads == ["/models/b", "/models/b"]
        fake.replies["reload_weights"] = [Reply(fault="reset")]

        def restarted(request: Request) -> Reply:
            fake.paused = fake.paused and b"reload" not in request.body
            return fake.script(request)

        server.script = restarted
        await admin.stage(B, "C")
        with pytest.raises(Conflict, match="not paused"):
            await admin.commit("C")
        assert len(fake.loads) == 3
        await admin.close()


async def test_a_broadcast_goes_through_the_three_steps_and_is_not_repeated() -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.join_group(Broadcaster("h", 1, rank=3, world_size=5))
        (joined,) = server.requests_to("/init_weight_transfer_engine")
        assert joined.json["init_info"]["rank_offset"] == 3
        await admin.pause("keep")
        await admin.stage(Source(group="weights", tensors=SPECS), "B")
        await admin.commit("B")
        (sent,) = server.requests_to("/update_weights")
        assert sent.json["update_info"] == {
            "names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[8]],
        }  # fmt: skip
        assert fake.version == "B"
        fake.replies["/update_weights"] = [Reply(fault="reset")]
        await admin.stage(Source(group="weights", tensors=SPECS), "C")
        with pytest.raises(Unavailable):
            await admin.commit("C")
        assert len(server.requests_to("/update_weights")) == 2
        with pytest.raises(Conflict, match="did not come from a directory"):
            await admin.rollback()
        with pytest.raises(UnsupportedField, match="shared memory"):
            await admin.stage(Source(shared="x", tensors=SPECS), "D")
        await admin.close()


# Never 200 alone


@pytest.mark.failure_mode("F23")
@pytest.mark.parametrize("body", [b"null", b"", b"{}", b'{"status":"error"}', b"ok"])
async def test_a_response_that_does_not_confirm_is_a_failure(body: bytes) -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        for path, call in (
            ("/pause", lambda: admin.pause("keep")),
            ("/resume", admin.resume),
            ("/reset_prefix_cache", admin.flush),
            ("/v1/load_lora_adapter", lambda: admin.load_adapter("ad", Path("/l"))),
            ("/is_paused", admin.view),
            ("/init_weight_transfer_engine",
             lambda: admin.join_group(Broadcaster("h", 1, 1, 2))),
        ):  # fmt: skip
            fake.replies[path] = [whole(body)]
            with pytest.raises(LockstepError, match=server.url):
                await call()
        await admin.close()


@pytest.mark.failure_mode("F23")
async def test_a_pause_that_did_not_pause_is_a_failure() -> None:
    fake = Vllm(replies={"/is_paused": [whole({"is_paused": False})]})
    async with serving(fake.script) as server:
        admin = driver(server)
        with pytest.raises(ContractError, match="is_paused"):
            await admin.pause("keep")
        fake.replies["/update_weight_version"] = [captured("rl_setver")]
        await admin.stage(B, "step-7")
        await admin.pause("keep")
        with pytest.raises(ContractError, match="'default', expected 'step-7'"):
            await admin.commit("step-7")
        fake.replies["reload_weights"] = [whole({"results": []})]
        with pytest.raises(ContractError, match="no rank responded"):
            await admin.commit("step-7")
        await admin.close()


@pytest.mark.failure_mode("F36")
async def test_a_server_that_hangs_in_pause_costs_a_bounded_time() -> None:
    fake = Vllm(replies={"/pause": [Reply((b"{",), fault="hang")] * 9})
    async with serving(fake.script) as server:
        admin = driver(server)
        with pytest.raises(DeadlineExceeded, match=server.url):
            await admin.pause("keep")
        assert len([r for r in server.requests if r.path.startswith("/pause")]) <= 3
        await admin.close()


async def test_flush_fails_while_requests_hold_prefixes_unless_they_may_be_reset() -> None:
    fake = Vllm(held=True)
    async with serving(fake.script) as server:
        admin = driver(server)
        with pytest.raises(Conflict, match="hold cached prefixes"):
            await admin.flush()
        await admin.flush(running_too=True)
        assert fake.resets == ["false", "false", "true"]
        await admin.close()


# Adapters


@pytest.mark.failure_mode("F30")
async def test_adapters_are_swapped_in_place_and_prefixes_dropped() -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        fake.replies["/v1/load_lora_adapter"] = [Reply(fault="reset")]
        assert await admin.load_adapter("ad", Path("/l/1"), "one") == "one"
        assert server.requests_to("/v1/load_lora_adapter")[-1].json["load_inplace"] is True
        assert (fake.resets, (await admin.view()).adapters) == (["false"], {"ad": "one"})
        fake.adapters["ad"] = "/l/other"
        assert (await admin.view()).adapters == {"ad": ""}, "someone else has swapped it"
        fake.replies["/v1/unload_lora_adapter"] = [Reply(fault="reset")]
        await admin.unload_adapter("ad")
        assert len(server.requests_to("/v1/unload_lora_adapter")) == 1
        with pytest.raises(UnknownModel, match="cannot be found"):
            await admin.unload_adapter("ad")
        await admin.close()


@pytest.mark.failure_mode("F84")
@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (None, "--enable-lora"),
        ({"target_modules": None}, "--lora-target-modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "may adapt lm_head"),
        ({"target_modules": ["q_proj"]}, None),
    ],
)
async def test_a_server_that_would_crash_on_proofs_beside_samples_is_rejected(
    lora: Any, says: str | None
) -> None:
    fake = Vllm()
    fake.replies["/server_info"] = [whole({"vllm_config": {"lora_config": lora}})]
    async with serving(fake.script) as server:
        admin = driver(server)
        if says is None:
            await admin.check_proved_beside_traffic()
        else:
            with pytest.raises(BadRequest, match=says):
                await admin.check_proved_beside_traffic()
        await admin.close()


@pytest.mark.failure_mode("F29")
async def test_an_adapter_that_cannot_be_loaded_is_an_adapter_error() -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        for name in ("lora_err_missing", "lora_err_badcfg"):
            fake.replies["/v1/load_lora_adapter"] = [captured(name)]
            with pytest.raises(AdapterError, match=server.url):
                await admin.load_adapter("ad", Path("/l"))
        fake.replies["/v1/load_lora_adapter"] = [captured("lora_load_v1")]
        with pytest.raises(ContractError, match="None, expected '/l'"):
            await admin.load_adapter("ad", Path("/l"))
        await admin.close()


# Probes


async def test_a_running_server_scores_over_http_and_a_paused_one_raises() -> None:
    fake = Vllm()
    async with serving(fake.script) as server:
        admin = driver(server)
        assert await admin.probe([[5, 6, 7], [1, 2]]) == [[-6.0, -7.0], [-2.0]]
        salts = {r.json["cache_salt"] for r in server.requests_to("/inference/v1/generate")}
        assert len(salts) == 2
        await admin.pause("keep")
        with pytest.raises(UnsupportedField, match="resume it without traffic"):
            await admin.probe([[5, 6, 7]])
        await admin.close()


# With the extension


async def test_the_extension_stages_commits_probes_and_rolls_back() -> None:
    fake = Vllm(extension=True, probes=True)
    async with serving(fake.script) as server:
        admin = await open_admin(server.url, budgets=QUICK)
        assert (admin.stages, admin.probes_while_paused) == (True, True)
        await admin.stage(Source(shared="block", tensors=SPECS), "B")
        assert ((await admin.view()).staged, fake.weights) == ("B", "start")
        await admin.commit("B")
        assert (fake.paused, fake.weights) == (False, "B")  # it was, for the time of the swap
        await admin.pause("keep")
        assert (fake.version, fake.resets) == ("B", ["false"])
        assert await admin.probe([[1, 2, 3]]) == [[-1.0, -1.0]]
        assert await admin.rollback() == "start"
        assert (await admin.view()).version == fake.version == "start"
        await admin.close()


@pytest.mark.failure_mode("F25")
async def test_a_lost_response_of_the_extension_is_settled_by_its_view() -> None:
    fake = Vllm(extension=True)
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.detect()
        await admin.pause("keep")
        await admin.stage(B, "B")
        fake.replies[rpc.COMMIT] = [Reply(fault="reset")]
        await admin.commit("B")
        fake.replies[rpc.ROLLBACK] = [Reply(fault="reset")]
        assert await admin.rollback() == "start"
        methods = [r.json["method"] for r in server.requests_to("/collective_rpc")]
        assert (methods.count(rpc.COMMIT), methods.count(rpc.ROLLBACK)) == (1, 1)
        assert fake.weights == "start"
        await admin.close()


@pytest.mark.failure_mode("F62")
async def test_commands_to_the_extension_carry_the_generation() -> None:
    fake = Vllm(extension=True)
    refused = {"error": {"message": "generation 9 was obeyed", "code": 409, "reason": "superseded"}}
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.detect()
        admin.fence(lambda: 8, "g1")
        await admin.pause("keep")
        await admin.stage(B, "B")
        await admin.commit("B")
        await admin.rollback()
        calls = [r.json for r in server.requests_to("/collective_rpc")]
        sent = {call["method"]: call["kwargs"].get("generation") for call in calls}
        assert sent == {rpc.VIEW: None, rpc.STAGE: 8, rpc.COMMIT: 8, rpc.ROLLBACK: 8}
        gateways = {call["method"]: call["kwargs"].get("gateway") for call in calls}
        assert gateways == {rpc.VIEW: None, rpc.STAGE: "g1", rpc.COMMIT: "g1", rpc.ROLLBACK: "g1"}
        fake.replies[rpc.STAGE] = [whole({"results": [refused, refused]})]
        with pytest.raises(Superseded, match="generation 9 was obeyed"):
            await admin.stage(B, "B")
        await admin.close()


async def test_ranks_that_do_not_agree_are_an_error() -> None:
    one, other = {"version": "A", "staged": None}, {"version": "B", "staged": None}
    fake = Vllm(extension=True)
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.detect()
        fake.replies[rpc.VIEW] = [whole({"results": [one, other]})]
        with pytest.raises(ContractError, match="the same of all ranks"):
            await admin.view()
        await admin.close()


@pytest.mark.failure_mode("F23")
async def test_an_error_of_one_rank_is_the_error_of_the_call() -> None:
    stated = {"error": {"message": "NaN weights", "code": 422, "reason": "bad_checkpoint"}}
    fake = Vllm(extension=True)
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.detect()
        fake.replies[rpc.STAGE] = [whole({"results": [{"staged": "B"}, stated]})]
        with pytest.raises(CheckpointError, match=rf"{server.url} {rpc.STAGE}: NaN weights"):
            await admin.stage(B, "B")
        await admin.close()


async def test_an_adapter_is_probed_over_http_while_the_server_runs() -> None:
    fake = Vllm(extension=True, probes=True, adapters={"ad": "/l"})
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.detect()
        assert await admin.probe([[1, 2]], adapter="ad") == [[-2.0]]
        (request,) = server.requests_to("/inference/v1/generate")
        assert request.json["model"] == "ad"
        await admin.close()


# prime-rl's server, and telling them apart


async def test_prime_rl_updates_keep_their_own_routes() -> None:
    fake = Vllm(prime=True, dev=False)
    async with serving(fake.script) as server:
        admin = await open_admin(server.url, budgets=QUICK)
        assert (admin.name, admin.stages) == ("prime-rl", False)
        await admin.stage(B, "B")
        with pytest.raises(Conflict, match="pause it before"):
            await admin.commit("B")
        with pytest.raises(UnsupportedField, match="only supports keep"):
            await admin.pause("abort")
        await admin.pause("keep")
        fake.replies["/update_weights"] = [Reply(fault="reset")]
        await admin.commit("B")
        assert fake.loads == ["/models/b", "/models/b"]
        with pytest.raises(UnsupportedField, match="paused"):
            await admin.probe([[1, 2]])
        await admin.resume()
        assert await admin.probe([[1, 2]]) == [[-2.0]]
        assert await admin.load_adapter("ad", Path("/l"), "one") == "one"
        view = await admin.view()
        assert (view.version, view.adapters) == (None, {"ad": "one"})
        await admin.join_group(Broadcaster("h", 1, rank=1, world_size=3))
        (joined,) = server.requests_to("/init_broadcaster")
        assert (joined.json["rank_offset"], joined.json["inference_world_size"]) == (0, 2)
        with pytest.raises(UnsupportedField, match="salt"):
            await admin.flush()
        await admin.close()


@pytest.mark.failure_mode("F23")
async def test_prime_rl_responses_without_confirmation_are_failures() -> None:
    fake = Vllm(prime=True, dev=False)
    async with serving(fake.script) as server:
        admin = PrimeAdmin(server.url, budgets=QUICK, backoff=0.01)
        for body in (b"null", b'{"status":"error","message":"no"}', b"{}"):
            for path in ("/pause", "/liveness", "/init_broadcaster"):
                fake.replies[path] = [whole(body)]
            for call in (
                admin.pause("keep"),
                admin.view(),
                admin.join_group(Broadcaster("h", 1, 1, 2)),
            ):
                with pytest.raises(LockstepError, match=server.url):
                    await call
        await admin.pause("keep")
        await admin.stage(Source(group="weights"), "B")
        fake.replies["/update_weights"] = [Reply(fault="reset")]
        with pytest.raises(Unavailable):
            await admin.commit("B")
        assert fake.loads == [None], "a second receive would wait forever"
        with pytest.raises(Conflict, match="half-loaded"):
            await admin.resume()
        await admin.close()


async def test_the_error_for_a_vllm_server_without_control_routes_says_how_to_start_it() -> None:
    async with serving(Vllm(dev=False).script) as server:
        with pytest.raises(UnsupportedField, match="VLLM_SERVER_DEV_MODE"):
            await open_admin(server.url, budgets=QUICK)


async def test_cancelling_a_commit_leaves_it_marked_as_half_loaded() -> None:
    fake = Vllm(replies={"reload_weights": [Reply((b"{",), fault="hang")]})
    async with serving(fake.script) as server:
        admin = driver(server)
        await admin.pause("keep")
        await admin.stage(B, "B")
        task = asyncio.create_task(admin.commit("B"))
        while not any(b"reload_weights" in r.body for r in server.requests):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.gone.wait()
        with pytest.raises(Conflict, match="CancelledError"):
            await admin.resume()
        await admin.close()
