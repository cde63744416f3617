"""Model cards, the entries of GET /v1/models: read from any server, written by our own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lockstep.protocol.common.response import decode_response
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import ContractError
from lockstep.tokens.numerics import NumericsPlan


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model, or an adapter whose `parent` is its base model.

    If the server reports them: `numerics` describes the arithmetic of its workers, `logprob_mode`
    is the default mode of logprobs. `root` is where the model was loaded from.
    """

    id: str
    max_model_len: int | None = None
    weight_version: str | None = None
    parent: str | None = None
    owned_by: str | None = None
    numerics: NumericsPlan | None = None
    logprob_mode: LogprobMode | None = None
    root: str | None = None
    created: int = 0
    object: str = "model"
    permission: tuple[Any, ...] = ()


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class _ListedCard(ModelCard):
    """A card as servers write it: some use another name for its length."""

    context_window: int | None = None


class _List(msgspec.Struct):
    data: list[_ListedCard] | None = None


DECODER = msgspec.json.Decoder(_List)
FIELDS = tuple(ModelCard.__dataclass_fields__)


def decode_models(body: bytes | bytearray) -> list[ModelCard]:
    """Decode the cards of GET /v1/models. An adapter without a length has its parent's.

    Raises ContractError if the body has no list of cards.
    """
    cards = decode_response(DECODER, body).data
    if cards is None:
        raise ContractError("/v1/models has no data: expected a list of model cards")
    lengths = {card.id: card.max_model_len or card.context_window for card in cards}
    return [
        replace(
            ModelCard(*[getattr(card, name) for name in FIELDS]),
            max_model_len=lengths[card.id] or lengths.get(card.parent or ""),
        )
        for card in cards
    ]
