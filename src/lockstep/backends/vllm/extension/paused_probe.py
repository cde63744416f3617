"""Scores of sequences under the live weights while vLLM's scheduler is paused.

A paused vLLM queues requests, so the worker is called below the scheduler, with a batch of one
prompt as the scheduler would send it. The cache blocks for it may belong to a paused request: their
contents are saved and restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec

from lockstep.tokens.errors import BadRequest, ContractError

FIRST_BLOCK = 1
"""Block 0 is vLLM's null block."""


def can_probe(worker: Any) -> bool:
    """Return whether this kind of worker can be called below its scheduler.

    Only tested setups: one rank on a CPU, one kind of cache. With more ranks, with asynchronous
    scheduling or with drafts, a batch leaves state behind that the next one relies on.
    """
    config, runner = worker.vllm_config, worker.model_runner
    groups = runner.kv_cache_config.kv_cache_groups
    return (
        worker.device.type == "cpu"
        and not worker.use_v2_model_runner
        and config.parallel_config.world_size_across_dp == 1
        and not config.scheduler_config.async_scheduling
        and config.speculative_config is None
        and config.kv_transfer_config is None
        and len(groups) == 1
        and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
    )


def score(worker: Any, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the logprobs of every token after the first of each sequence. Raises BadRequest for a
    sequence that does not fit into one batch."""
    return [_score(worker, list(ids)) for ids in token_ids]


def _score(worker: Any, ids: list[int]) -> list[float]:
    runner, config = worker.model_runner, worker.vllm_config
    vocab = config.model_config.get_vocab_size()
    limit = min(
        config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len - 1
    )
    if not 2 <= len(ids) <= limit:
        raise BadRequest(
            f"a probe sequence has {len(ids)} tokens, expected 2 to {limit}", param="token_ids"
        )
    if not all(0 <= token < vocab for token in ids):
        raise BadRequest(f"a probe has token ids outside 0 to {vocab - 1}", param="token_ids")
    name = f"lockstep-probe-{uuid4().hex}"
    size = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    # The runner samples one more token, which needs a place in the cache as well.
    blocks = list(range(FIRST_BLOCK, FIRST_BLOCK + len(ids) // size + 1))
    if blocks[-1] >= runner.kv_cache_config.num_blocks:
        raise BadRequest(f"a probe of {len(ids)} tokens does not fit into the cache")
    with _borrow_blocks(runner, blocks):
        try:
            runner.execute_model(_batch(name, ids, blocks))
            output = runner.sample_tokens(None)
        finally:
            # Without this the runner would keep the request and its blocks forever.
            end = SchedulerOutput.make_empty()
            end.finished_req_ids = {name}
            runner.execute_model(end)
    logprobs = output.prompt_logprobs_dict.get(name)
    if logprobs is None:
        raise ContractError("the worker returned no prompt logprobs for a probe")
    # The first column is the prompt token itself.
    values: list[float] = logprobs.logprobs[:, 0].tolist()
    return values


def _batch(name: str, ids: list[int], blocks: list[int]) -> Any:
    batch = SchedulerOutput.make_empty()
    batch.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=ids,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
            pooling_params=None,
            block_ids=(blocks,),
            num_computed_tokens=0,
            lora_request=None,
        )
    ]
    batch.num_scheduled_tokens = {name: len(ids)}
    batch.total_num_scheduled_tokens = len(ids)
    batch.new_block_ids_to_zero = blocks
    return batch


@contextmanager
def _borrow_blocks(runner: Any, blocks: list[int]) -> Iterator[None]:
    """Restore the contents of these cache blocks after the block of code."""
    caches = {id(cache): cache for cache in runner.kv_caches}.values()
    saved = [cache[blocks].clone() for cache in caches]
    try:
        yield
    finally:
        for cache, contents in zip(caches, saved, strict=True):
            cache[blocks] = contents
