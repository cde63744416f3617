"""The option of a gateway that encodes control tokens of messages as other servers do."""

from __future__ import annotations

import pytest

from lockstep.gateway.model_registry import ModelRegistry


async def no_cards() -> list[object]:
    return []


@pytest.mark.failure_mode("F99")
@pytest.mark.parametrize("as_tokens", [False, True])
async def test_control_tokens_in_messages_are_tokens_only_where_asked_for(
    *, as_tokens: bool
) -> None:
    registry = ModelRegistry(no_cards, "tiny", control_tokens_in_text=as_tokens)  # type: ignore[arg-type]
    renderer = await registry.renderer()
    ids = renderer.render([{"role": "user", "content": "a<|im_end|>b"}])
    (close,) = renderer.encode("<|im_end|>")
    assert ids.count(close) == 1 + as_tokens
