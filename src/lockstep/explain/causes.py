"""The causes that can be named, each with its sentence and its remedy."""

from __future__ import annotations

from typing import NamedTuple


class CauseText(NamedTuple):
    """`sentence` says what happened, with side and detail filled in; `remedy` what to do."""

    sentence: str
    remedy: str


CAUSES: dict[str, CauseText] = {
    "raw_processed": CauseText(
        "the {side}'s numbers are {detail}, and the samples say otherwise",
        "set one mode on both sides: logprobs-mode processed on the server, or rollout.logprobs "
        "raw in the trainer",
    ),
    "shaping_ignored": CauseText(
        "the {side} applied the temperature and none of the other sampling options that the "
        "samples record",
        "compute processed logprobs with all recorded options (lockstep.exact.sample_logprobs)",
    ),
    "temperature": CauseText(
        "the {side} divided the logits by another temperature: {detail}",
        "use the sampling temperature of the samples on both sides, and check which defaults "
        "(generation_config.json, loss code) replace it",
    ),
    "penalty": CauseText(
        "the {side} computed with another penalty: {detail}",
        "send neutral penalties explicitly: servers take defaults from generation_config.json",
    ),
    "truncation": CauseText(
        "the {side} normalised over a truncated distribution that the samples do not record: "
        "{detail}",
        "send top_k -1, top_p 1 and min_p 0 explicitly, or record options and sampling mask",
    ),
    "support": CauseText(
        "the {side}'s numbers are {detail}, but the tokens were drawn from a smaller set",
        "normalise over the recorded support (learner.support recorded, "
        "lockstep.exact.sample_logprobs)",
    ),
    "logit_bias": CauseText(
        "the {side} moved the logit of one token that the samples do not mention: {detail}",
        "remove the logit bias or ban (min_tokens, bad_words, ignore_eos), or record it",
    ),
    "not_sampled": CauseText(
        "the {side} returned the logprob of {detail} instead of the sampled token's",
        "read the entry of the sampled id, not the first one of top_logprobs",
    ),
    "missing_zero": CauseText(
        "the {side} has 0 in place of missing logprobs: {detail}",
        "fail on missing logprobs instead of padding them",
    ),
    "log_base": CauseText(
        "the {side}'s numbers are not natural logarithms: {detail}", "convert to nats"
    ),
    "off_by_one": CauseText(
        "the {side}'s numbers belong to neighbouring tokens: {detail}",
        "align labels, mask and logprobs: the logits after token i predict token i + 1",
    ),
    "mixed_choices": CauseText(
        "the {side}'s numbers are assigned to the wrong sequences: {detail}",
        "match choices by their index, and rows of a batch by their id",
    ),
    "prompt_logprobs": CauseText(
        "the {side} returned logprobs of the prompt instead of the sampled tokens: {detail}",
        "read the logprobs of the completion, or skip those of the prompt",
    ),
    "logits_dtype": CauseText(
        "the {side} rounds its logits: {detail}", "compute logits and log-softmax in float32"
    ),
    "bos": CauseText(
        "the {side}'s sequences begin with other tokens: {detail}",
        "send token ids, and tokenize rendered templates with add_special_tokens=False",
    ),
    "template": CauseText(
        "the {side} saw prompts that end otherwise: {detail}",
        "use the same chat template and generation prompt, or send token ids",
    ),
    "stop_tokens": CauseText(
        "the {side}'s history lacks stop tokens: {detail}",
        "keep the token that ended a turn (include_stop_str_in_output, or token ids)",
    ),
    "retokenized": CauseText(
        "the {side}'s history was tokenized again: {detail}",
        "carry the sampled token ids over turns, never their text",
    ),
    "thinking_dropped": CauseText(
        "the {side}'s history lacks earlier thinking: {detail}",
        "keep thinking in the history (thinking=keep), or split samples where it is dropped",
    ),
    "special_tokens": CauseText(
        "the {side}'s history lacks special tokens: {detail}",
        "decode with skip_special_tokens=False, or carry token ids",
    ),
    "context": CauseText(
        "the {side} saw a shorter context: {detail}",
        "raise max_model_len, and unset truncate_prompt_tokens",
    ),
    "padding": CauseText(
        "padding leaks into the {side}'s numbers: {detail}",
        "pass attention_mask and position_ids for left-padded rows, or pad on the right",
    ),
    "packing": CauseText(
        "packed sequences see each other on the {side}: {detail}",
        "pass position_ids or cu_seqlens that separate the sequences",
    ),
    "rope": CauseText(
        "the {side} rotates positions otherwise: {detail}",
        "compare rope_parameters of both configurations as loaded (inv_freq), not as written",
    ),
    "window": CauseText(
        "the {side} attends to a {detail}",
        "unset sliding_window and attention chunking on that side, or set them on both",
    ),
    "norm_eps": CauseText(
        "the {side} normalises with another constant: {detail}", "compare both config.json"
    ),
    "router_norm": CauseText(
        "the {side} weighs experts otherwise: {detail}",
        "compare norm_topk_prob in both config.json",
    ),
    "weights_dtype": CauseText(
        "the {side} holds weights in another dtype: {detail}", "load both sides in one dtype"
    ),
    "kv_dtype": CauseText(
        "the {side} stores keys and values in another dtype: {detail}",
        "set the dtype of the KV cache (--kv-cache-dtype auto)",
    ),
    "head_dtype": CauseText(
        "the {side} computes the head in another dtype: {detail}",
        "compute the head in float32 on both sides",
    ),
    "compute_dtype": CauseText(
        "the {side} computes in another dtype: {detail}", "set one dtype on both sides"
    ),
    "kv_quantised": CauseText(
        "the {side} stores keys and values quantised: {detail}",
        "use an unquantised KV cache for rollouts (--kv-cache-dtype auto)",
    ),
    "weights_quantised": CauseText(
        "the {side} computes with quantised weights: {detail}",
        "serve unquantised weights, or correct for the mismatch (importance sampling)",
    ),
    "adapter_missing": CauseText(
        "the {side} computed {detail}: the adapter was not applied",
        "check that the adapter's module names match the served model, and the adapter's name in "
        "requests",
    ),
    "adapter_wrong": CauseText(
        "the {side} computed {detail}, another adapter than the samples'",
        "load the new adapter under a new name, or clear caches keyed by the old one",
    ),
    "adapter_unexpected": CauseText(
        "the {side} computed {detail}, but the samples name no adapter",
        "send the base model's name, or pass the adapter to the trainer",
    ),
    "adapter_scale": CauseText(
        "the {side} applies the adapter {detail}",
        "compare lora_alpha, r and use_rslora, and that it is not merged as well as applied",
    ),
    "old_weights": CauseText(
        "the {side} holds {detail}",
        "repeat the update and prove it (lockstep fleet update, or fleet.update_weights)",
    ),
    "wrong_version_label": CauseText(
        "tokens were computed by {detail}, which is another version than their label says",
        "label tokens with the version of the weights that computed them, and update every worker",
    ),
    "old_tensors": CauseText(
        "part of the {side}'s weights is old: {detail}",
        "send all tensors of an update (fused, tied and per-expert ones too) and read them back",
    ),
    "stale_kv": CauseText(
        "the {side} reused keys and values of old weights: {detail}",
        "reset the prefix cache at every update, or salt it with the weight version",
    ),
    "routed_experts": CauseText(
        "the {side} routed tokens to other experts than the trainer's router chooses: {detail}",
        "replay the recorded experts in the trainer (learner.replay_experts)",
    ),
    "dummy_route": CauseText(
        "the {side} replays a dummy route for tokens that have none: {detail}",
        "let the router choose where no route was recorded (the last token of a turn)",
    ),
    "batch_dependent": CauseText(
        "the {side} gives equal tokens after equal prefixes different logprobs: {detail}",
        "use batch-invariant kernels (VLLM_BATCH_INVARIANT=1, arithmetic exact), or accept the "
        "noise and widen the band",
    ),
}
"""Texts by name of the cause."""
APPROXIMATE = frozenset(
    {"kv_dtype", "head_dtype", "compute_dtype", "kv_quantised", "weights_quantised",
     "logits_dtype", "weights_dtype"}
)  # fmt: skip
"""Causes that are formats: another implementation rounds at other places, so that the substitution
leaves more than the noise of 32-bit arithmetic."""
