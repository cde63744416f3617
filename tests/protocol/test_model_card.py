"""Model cards: any server's list is read, and what we write reads back the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockstep.protocol.common.model_card import ModelCard, ModelList, decode_models
from lockstep.tokens.errors import ContractError
from lockstep.tokens.numerics import NumericsPlan

PLAN = NumericsPlan(
    arithmetic="exact", device="cpu", dtype="float32", rows=4, mkl="AVX2", isa="AVX2", torch="2",
    fingerprint="f",
)  # fmt: skip


def listed(*cards: dict[str, Any]) -> list[ModelCard]:
    return decode_models(msgspec.json.encode({"object": "list", "data": cards}))


def test_a_card_reads_back_as_it_was_written() -> None:
    cards = [
        ModelCard("tiny", 1024, "v1", None, "lockstep", PLAN, "processed", "/models/tiny", 7),
        ModelCard("lora", 512, "v1+a", "tiny", "lockstep", PLAN, "raw", "/adapters/lora", 7),
    ]
    assert decode_models(msgspec.json.encode(ModelList(cards))) == cards


def test_an_adapter_without_a_length_has_its_parents_under_either_name() -> None:
    cards = listed({"id": "base", "context_window": 99}, {"id": "lora", "parent": "base"})
    assert [card.max_model_len for card in cards] == [99, 99]
    assert listed({"id": "unknown", "owned_by": "vllm"})[0].max_model_len is None


def test_a_numerics_of_a_newer_worker_may_have_more_fields_but_not_fewer() -> None:
    plan = {**PLAN.to_json(), "invented": 1}
    assert listed({"id": "tiny", "numerics": plan})[0].numerics == PLAN
    del plan["fingerprint"]
    with pytest.raises(ContractError, match="fingerprint"):
        listed({"id": "tiny", "numerics": plan})


@pytest.mark.parametrize("body", [b"{}", b'{"data": null}', b'{"data": [{}]}', b"[]", b"no"])
def test_what_is_no_list_of_cards_is_refused(body: bytes) -> None:
    with pytest.raises(ContractError):
        decode_models(body)
