"""Walks through every call of the SDK, and prints what came back."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker
import torch
from tinker import types

IDS = [5, 17, 300, 42, 8, 99, 120, 7, 33, 250]
SAMPLED = 6


def datum(**inputs: list[float] | list[int]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": IDS[1:], **inputs},
    )


def refused(call: Any) -> str:
    """The error that a call ends in."""
    try:
        result = call()
        if hasattr(result, "result"):
            result.result(60)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def main() -> None:
    out: dict[str, Any] = {}
    service = tinker.ServiceClient()
    out["models"] = [
        [each.model_name, each.max_context_length]
        for each in service.get_server_capabilities().supported_models
    ]
    client = service.create_lora_training_client("tiny", rank=8, seed=1, user_metadata={"k": "v"})
    info = client.get_info()
    out["info"] = [info.model_name, info.is_lora, info.lora_rank]
    out["tokens"] = client.get_tokenizer().encode("Reverse: 12")

    # Losses
    plain = [1.0] * (len(IDS) - 1)
    first = client.forward([datum(weights=plain)], "cross_entropy").result()
    logprobs = first.loss_fn_outputs[0]["logprobs"].tolist()
    out["forward"] = {"logprobs": logprobs, "metrics": first.metrics}
    policy = {"logprobs": [each + 0.1 for each in logprobs], "advantages": [0.0, 1.0, -0.5] * 3}
    gspo = {"sequence_ratio_mask": plain, **policy}
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    out["losses"] = {}
    for name, inputs, config in (
        ("cross_entropy", {"weights": plain}, None),
        ("importance_sampling", policy, None),
        ("ppo", policy, clip),
        ("cispo", policy, clip),
        ("dro", policy, {"beta": 0.1}),
        ("gspo", gspo, clip),
    ):
        result = client.forward_backward([datum(**inputs)], name, config).result()
        out["losses"][name] = result.metrics["loss:sum"]
    step = client.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()
    out["grad_norm"] = step.metrics["grad_norm"]

    def squares(data: list[types.Datum], rows: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = torch.stack([row.square().sum() for row in rows]).sum()
        return loss, {"squares": float(loss.detach())}

    custom = client.forward_backward_custom([datum(weights=plain)], squares).result()
    out["custom"] = custom.metrics["squares"]
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    # Samplers
    named = client.save_weights_for_sampler("first").result().path
    sampler = service.create_sampling_client(model_path=named)
    base = service.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints(IDS)
    params = types.SamplingParams(max_tokens=SAMPLED, temperature=0.7, seed=4, stop=[])
    drawn = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    sequences = [list(each.tokens) for each in drawn.sequences]
    whole = [IDS + each for each in sequences]
    scored = [
        client.forward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints(ids[:-1]),
                    loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
                )
            ],
            "cross_entropy",
        ).result()
        for ids in whole
    ]
    out["sampled"] = {
        "tokens": sequences,
        "reasons": [each.stop_reason for each in drawn.sequences],
        "logprobs": [list(each.logprobs) for each in drawn.sequences],
        "trainer": [each.loss_fn_outputs[0]["logprobs"].tolist()[-SAMPLED:] for each in scored],
    }
    again = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    out["seeded_again"] = [list(each.tokens) for each in again.sequences] == sequences
    stop = sequences[0][1]
    stopped = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=SAMPLED, temperature=0.7, seed=4, stop=[stop])
    ).result()
    out["stopped"] = [list(stopped.sequences[0].tokens), stopped.sequences[0].stop_reason]
    out["stop"] = [sequences[0][: sequences[0].index(stop) + 1], stop]
    text = client.get_tokenizer().decode([sequences[0][0]])
    worded = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=SAMPLED, temperature=0.7, seed=4, stop=text)
    ).result()
    out["worded"] = [list(worded.sequences[0].tokens), worded.sequences[0].stop_reason]
    tops = sampler.sample(
        prompt, 1, types.SamplingParams(max_tokens=2), True, topk_prompt_logprobs=3
    ).result()
    out["tops"] = [tops.prompt_logprobs, tops.topk_prompt_logprobs]
    out["computed"] = sampler.compute_logprobs(prompt).result()
    out["base_differs"] = base.compute_logprobs(prompt).result() != out["computed"]
    out["base_model"] = sampler.get_base_model()

    # States
    saved = client.save_state("one").result().path
    ephemeral = client.save_weights_and_get_sampling_client()
    out["ephemeral"] = ephemeral.compute_logprobs(prompt).result() == out["computed"]
    loaded = service.create_training_client_from_state(saved)
    whole_state = service.create_training_client_from_state_with_optimizer(saved)
    after = {}
    for name, each in (("saved", client), ("weights", loaded), ("optimizer", whole_state)):
        each.forward_backward([datum(weights=plain)], "cross_entropy").result()
        each.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        result = each.forward([datum(weights=plain)], "cross_entropy").result()
        after[name] = result.loss_fn_outputs[0]["logprobs"].tolist()
    out["after"] = after

    # What there is
    rest = service.create_rest_client()
    run = rest.get_training_run_by_tinker_path(saved).result()
    out["run"] = [run.base_model, run.lora_rank, run.user_metadata, run.last_checkpoint.tinker_path]
    out["runs"] = len(rest.list_training_runs().result().training_runs)
    rest.set_checkpoint_ttl_from_tinker_path(saved, 3600).result()
    rest.publish_checkpoint_from_tinker_path(saved).result()
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    out["checkpoints"] = sorted([each.checkpoint_id, each.public] for each in listed)
    out["expires"] = any(each.expires_at for each in listed)
    rest.unpublish_checkpoint_from_tinker_path(saved).result()
    weights = rest.get_weights_info_by_tinker_path(saved).result()
    out["weights_info"] = [weights.base_model, weights.lora_rank, weights.train_unembed]
    rest.delete_checkpoint_from_tinker_path(saved).result()
    left = rest.list_user_checkpoints().result().checkpoints
    out["left"] = [each.checkpoint_id for each in left]
    sessions = rest.list_sessions().result().sessions
    session = rest.get_session(sessions[0]).result()
    out["session"] = [len(session.training_run_ids), len(session.sampler_ids) >= 3]

    # What is refused
    adam = types.AdamParams()
    out["refused"] = {
        "model": refused(lambda: service.create_lora_training_client("gpt-7", rank=8)),
        "rank": refused(lambda: service.create_lora_training_client("tiny", rank=999)),
        "loss": refused(lambda: client.forward_backward([datum()], "stable_reinforce")),
        "step_after": refused(lambda: client.optim_step(adam)),
        "step_again": refused(lambda: client.optim_step(adam)),
        "target": refused(
            lambda: client.forward_backward([datum(weights=[1.0, 2.0])], "cross_entropy")
        ),
        "path": refused(lambda: client.load_state("tinker://nobody/weights/x")),
        "deleted": refused(lambda: service.create_training_client_from_state(saved)),
        "taken": refused(lambda: client.save_weights_for_sampler("first")),
    }
    service.close("success", "done")
    print(json.dumps(out))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # now and then the SDK's transport aborts while the interpreter ends
