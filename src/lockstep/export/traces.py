"""Samples in the trace formats of verifiers and OpenEnv, which their trainers read.

Neither package is needed. The formats are those of verifiers 0.4 (trace version 1, `WireTrace`) and
OpenEnv 0.10 (`openenv.core.harness.training.TrainingTrace`, schema 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.export.exported import ExportedSample, turns
from lockstep.tokens import Sample

Decode = Callable[[Sequence[int]], str]


def verifiers_trace(exported: ExportedSample, decode: Decode) -> dict[str, Any]:
    """Return the trace of one branch, with a node for each sampled range and each range between.

    The boundaries of messages within a prompt are not known, so that all tokens between two sampled
    ranges are one node with the role user.
    """
    sample = exported.sample
    nodes: list[dict[str, Any]] = []
    at = 0
    for start, end in turns(sample):
        if start > at or not nodes:
            nodes.append(_node(sample, at, start, len(nodes), decode))
        nodes.append(_node(sample, start, end, len(nodes), decode))
        at = end
    if at < len(sample.token_ids):
        nodes.append(_node(sample, at, len(sample.token_ids), len(nodes), decode))
    return {
        "version": 1,
        "id": exported.id,
        "verifiers": {"version": "0.4.0"},
        "task": {
            "type": "LockstepSample",
            "data": {"idx": exported.index, "name": exported.source, "prompt": None},
        },
        "agent": {
            "config": {},
            "name": sample.harness or "agent",
            "trainable": any(sample.sampled_mask),
        },
        "nodes": nodes,
        "rewards": {} if sample.reward is None else {"reward": {"score": sample.reward}},
        "info": _about(exported)
        | {"sampling_mask": _sampling_mask(sample, 0, len(sample.token_ids))},
        "is_completed": True,
        "ok": True,
    }


def _node(sample: Sample, start: int, end: int, index: int, decode: Decode) -> dict[str, Any]:
    mask = sample.sampled_mask[start:end]
    sampled = bool(mask) and mask[0]
    return {
        "parent": index - 1 if index else None,
        "message": {
            "role": "assistant" if sampled else "user",
            "content": decode(sample.token_ids[start:end]),
        },
        "sampled": sampled,
        "token_ids": sample.token_ids[start:end],
        "mask": mask,
        "logprobs": sample.logprobs[start:end] if sampled else [],
    }


def openenv_trace(exported: ExportedSample) -> dict[str, Any]:
    """Return a training trace with one turn for each sampled range."""
    sample = exported.sample
    about = _about(exported)
    return {
        "schema_version": 1,
        "turns": [
            {
                "node_id": f"{exported.id}:{start}",
                "prompt_token_ids": sample.token_ids[:start],
                "completion_token_ids": sample.token_ids[start:end],
                "per_token_logps": sample.logprobs[start:end],
                "loss_mask": [0] * start + [1] * (end - start),
                "metadata": about | {"sampling_mask": _sampling_mask(sample, start, end)},
            }
            for start, end in turns(sample)
        ],
    }


def _sampling_mask(sample: Sample, start: int, end: int) -> list[list[int]] | None:
    """Return the ids that tokens [start, end) were drawn from, as vLLM's responses have them."""
    return None if sample.support is None else sample.support.slice(start, end).lists()


def _about(exported: ExportedSample) -> dict[str, Any]:
    """Return the facts for which neither format has a field."""
    sample = exported.sample
    return {
        "source": exported.source,
        "step": exported.step,
        "advantage": exported.advantage,
        "reward": sample.reward,
        "weight": sample.weight,
        "versions": [[span.version, span.start, span.end] for span in sample.versions],
        "logprob_mode": sample.logprob_mode,
        "temperature": sample.temperature,
        "support": "absent" if sample.support_absent else None,
        "kind": sample.kind,
        "branch": sample.branch,
        "breaks": list(sample.breaks),
    }
