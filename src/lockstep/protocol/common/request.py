"""One request to an engine in any dialect, validated on construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from lockstep.protocol.json.lazy_ids import LazyIds
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest, BadTokenId
from lockstep.tokens.versions import check_label

MAX_SALT = 1024
MOST_IDS = 1 << 31
"""Upper bound of ids: no vocabulary is as large. The engine decides which ids exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Token ids and sampling options. Raises BadTokenId or BadRequest that names the field.

    `priority` has vLLM's sign everywhere: lower is sooner; each dialect converts it.
    `experts_start` requests routed experts from that position on; None requests none.
    `experts_skipped` requests none either: if a server returns them anyway, it omits the rows
    before that position. `support` requests the set that each token was drawn from: true wherever
    options restrict it, None only where the set depends on the weights. `weight_version` requires
    one version, `min_weight_version` a minimum.
    `nvext` is merged into Dynamo's extension, `features` carries vLLM's multimodal payload.
    `timeout` is in seconds for the whole call. `allow_nonfinite` keeps NaN and sentinel logprobs in
    the completion instead of rejecting the response.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    experts_start: int | None = None
    experts_skipped: int | None = None
    support: bool | None = None
    weight_version: str | None = None
    min_weight_version: str | None = None
    nvext: Mapping[str, Any] | None = None
    features: Any = None
    headers: Mapping[str, str] | None = None
    timeout: float | None = None
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        check_prompt(self.prompt_ids)
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT:
            raise BadRequest(
                f"cache_salt has {len(self.cache_salt)} characters: expected 1 to {MAX_SALT}, "
                "or None",
                param="cache_salt",
            )
        if not -(2**63) <= self.priority < 2**63:
            raise BadRequest(f"priority is {self.priority}: it must fit 64 bits", param="priority")
        for option, start in (
            ("experts_start", self.experts_start),
            ("routed_experts_prompt_start", self.experts_skipped),
        ):
            if start is not None and not 0 <= start <= len(self.prompt_ids):
                raise BadRequest(
                    f"{option} is {start}: expected a position of the prompt, "
                    f"0 to {len(self.prompt_ids)}",
                    param=option,
                )
        for name in ("weight_version", "min_weight_version"):
            if (label := getattr(self, name)) is not None:
                check_label(label, name)
        if self.timeout is not None and self.timeout <= 0:
            raise BadRequest(f"timeout is {self.timeout}: expected seconds > 0", param="timeout")

    @property
    def first_experts_row(self) -> int | None:
        """Position of the first row of routed experts, if any are returned."""
        return self.experts_skipped if self.experts_start is None else self.experts_start

    @property
    def wants_support(self) -> bool:
        """Whether the response must have the set that each token was drawn from."""
        return self.sampling.records_support(self.support)

    def alone(self, index: int) -> GenerateRequest:
        """Return this request for choice `index` only, for servers with one choice per request.

        Seeds differ per choice, as in vLLM; otherwise all n choices would be equal.
        """
        if self.sampling.n == 1:
            return self
        seed = self.sampling.seed
        return replace(
            self,
            sampling=replace(self.sampling, n=1, seed=None if seed is None else seed + index),
            request_id=None if self.request_id is None else f"{self.request_id}-{index}",
        )


def check_prompt(ids: Sequence[int]) -> None:
    """Raise BadTokenId for the first id that is not a non-negative integer."""
    if isinstance(ids, LazyIds):
        return  # checked already
    if not isinstance(ids, list):
        raise BadTokenId(
            f"prompt_ids is a {type(ids).__name__}: expected a list of token ids",
            param="prompt_ids",
        )
    if not ids:
        raise BadTokenId("prompt_ids is empty: at least one token id is needed", param="prompt_ids")
    if _only_digits(ids):
        return
    for at, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < MOST_IDS:
            raise BadTokenId(
                f"prompt_ids[{at}] is {token!r} ({type(token).__name__}): token ids are plain "
                "integers >= 0 (an array becomes a list of them with .tolist())",
                param=f"prompt_ids[{at}]",
            )


def _only_digits(ids: list[int]) -> bool:
    """Return whether the ids are plain integers; scanning their JSON is cheaper than testing
    each.
    """
    try:
        return not msgspec.json.encode(ids)[1:-1].translate(None, b"0123456789,")
    except (TypeError, OverflowError, msgspec.MsgspecError):
        return False
