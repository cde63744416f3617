"""vLLM's POST /tokenize and /detokenize: requests in two forms, and responses.

Where vLLM lets one form take precedence, or turns an unknown id into empty text, the request is
rejected here, so that the meaning of a response is never ambiguous.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.protocol.common.sampling_fields import SamplingFields
from lockstep.protocol.json.strict import decode, refuse_unless_neutral
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.ids import check_ids

CHAT_ONLY = (
    "add_generation_prompt", "continue_final_message", "tools", "chat_template",
    "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "required_prefix_token_ids",
)  # fmt: skip
NEUTRAL: dict[str, tuple[object, ...]] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}
PLACES = 2**31
"""Upper bound of ids; the tokenizer decides which of them exist."""


class TokenizeRequest(SamplingFields, kw_only=True):
    """Text to encode (`prompt`), or a conversation to render (`messages`), not both.

    A client may send the body of its chat request unchanged: sampling fields, and the fields of the
    last block, have no effect on the ids.

    `add_special_tokens` is on by default for a prompt and off for a chat, whose template writes its
    own. `required_prefix_token_ids` is NeMo-RL's: the ids start with exactly these, followed by the
    ids of the messages after the last assistant turn.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    return_token_bytes: bool | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    required_prefix_token_ids: list[int] | None = None

    chat_template: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_id_information: bool | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    user: str | None = None

    @property
    def special(self) -> bool:
        """Whether the tokenizer adds its own prefix and suffix."""
        special = self.add_special_tokens
        return self.messages is None if special is None else special


class TokenizedPrompt(msgspec.Struct, kw_only=True):
    """The response. `token_strs` are the vocabulary's own strings, which are lossless."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None
    token_bytes: list[list[int]] | msgspec.UnsetType = msgspec.UNSET


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
    return_token_bytes: bool | None = None


class DetokenizedText(msgspec.Struct, kw_only=True):
    """The response, including special tokens. Invalid UTF-8 is replaced in `prompt`."""

    prompt: str
    token_bytes: list[list[int]] | msgspec.UnsetType = msgspec.UNSET


TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Decode the request in `body`. Raises BadRequest, UnknownField or UnsupportedField."""
    request = decode(TOKENIZE, body)
    if (request.prompt is None) == (request.messages is None):
        both = "both prompt and messages are" if request.prompt is not None else "neither is"
        raise BadRequest(
            f"{both} there: send prompt to encode a text, or messages to render a chat",
            param="prompt",
        )
    if request.prompt is not None:
        for field in CHAT_ONLY:
            if getattr(request, field) is not None:
                raise BadRequest(
                    f"{field} belongs to the form with messages, but prompt is there: send one",
                    param=field,
                )
        return request
    _check_chat(request)
    return request


def decode_detokenize(body: bytes) -> DetokenizeRequest:
    """Decode the request in `body`. Raises BadRequest, UnknownField or BadTokenId."""
    request = decode(DETOKENIZE, body)
    if request.tokens:
        check_ids(request.tokens, PLACES, "tokens")
    return request


def _check_chat(request: TokenizeRequest) -> None:
    refuse_unless_neutral(request, NEUTRAL)
    if request.chat_template is not None:
        raise UnsupportedField(
            "chat_template is not taken from requests: a template is a program; serve the model "
            "with the one you want",
            param="chat_template",
        )
    if request.continue_final_message and request.add_generation_prompt is not False:
        raise BadRequest(
            "continue_final_message needs add_generation_prompt=false: either the last message "
            "goes on, or a new one is opened",
            param="continue_final_message",
        )
    if request.required_prefix_token_ids is not None:
        check_ids(request.required_prefix_token_ids, PLACES, "required_prefix_token_ids")
        if request.special:
            raise BadRequest(
                "add_special_tokens does not go with required_prefix_token_ids: nothing is put "
                "before them",
                param="add_special_tokens",
            )
