"""Keyword options of a call: how to sample, and how to send the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Sampling
from lockstep.tokens.errors import BadRequest

SAMPLING = frozenset(field.name for field in fields(Sampling))
SENDING = frozenset(
    ("cache_salt", "priority", "experts_start", "support", "weight_version", "min_weight_version",
     "nvext", "headers", "timeout", "allow_nonfinite", "request_id")
)  # fmt: skip
SEQUENCES = ("stop", "stop_token_ids", "allowed_token_ids")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a policy, a chat or a single call; the more specific ones take precedence."""

    sampling: Sampling = field(default_factory=Sampling)
    sending: Mapping[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Options:
        """Return these options with some changed. Raises BadRequest that names an unknown one."""
        if not changes:
            return self
        for name in changes:
            if name not in SAMPLING | SENDING:
                names = ", ".join(sorted(SAMPLING | SENDING))
                raise BadRequest(f"unknown option {name!r}: expected one of {names}", param=name)
        sampling = {name: value for name, value in changes.items() if name in SAMPLING}
        for name in SEQUENCES:
            if sampling.get(name) is not None:
                value = sampling[name]
                sampling[name] = (value,) if isinstance(value, str) else tuple(value)
        sending = {name: value for name, value in changes.items() if name in SENDING}
        return Options(replace(self.sampling, **sampling), {**self.sending, **sending})

    def request(
        self, prompt_ids: Sequence[int], model: str | None, stop_token_ids: tuple[int, ...] = ()
    ) -> GenerateRequest:
        """Return the request to send; `stop_token_ids` are added to the caller's."""
        stops = tuple(dict.fromkeys((*self.sampling.stop_token_ids, *stop_token_ids)))
        return GenerateRequest(
            prompt_ids=prompt_ids,
            sampling=replace(self.sampling, stop_token_ids=stops),
            model=model,
            **self.sending,
        )
