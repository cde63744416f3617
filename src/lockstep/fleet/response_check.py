"""Checks of a worker's response against what no engine can return."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion
from lockstep.tokens.errors import ImpossibleResponse

ROUNDING = 1e-3
"""Largest logprob above 0 that rounding explains."""
LARGEST_ID = (1 << 31) - 1


class ResponseCheck:
    """Limits of token ids, logprobs and lengths, shared by the workers of a pool.

    `vocab_size` is None until the model's tokenizer is known; ids are then bounded by 2**31.
    """

    def __init__(self) -> None:
        self.vocab_size: int | None = None

    def check(
        self, request: GenerateRequest, completions: Iterable[Completion], worker: str
    ) -> None:
        """Raise ImpossibleResponse, which names the worker, for a completion that cannot be."""
        for completion in completions:
            self.check_tokens(
                request,
                completion.index,
                completion.token_ids,
                () if completion.allow_nonfinite else completion.logprobs,
                len(completion.token_ids),
                worker,
            )

    def check_tokens(
        self,
        request: GenerateRequest,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        generated: int,
        worker: str,
    ) -> None:
        """Run `check` for new tokens of one choice, which has `generated` tokens so far."""
        limit = request.sampling.max_tokens
        if limit is not None and generated > limit:
            raise _impossible(worker, index, f"{generated} tokens, but max_tokens is {limit}")
        size = self.vocab_size or LARGEST_ID + 1
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            wrong = next(token for token in token_ids if not 0 <= token < size)
            raise _impossible(worker, index, f"token id {wrong}, expected 0 to {size - 1}")
        if logprobs and max(logprobs) > ROUNDING:
            raise _impossible(worker, index, f"logprob {max(logprobs)}, expected at most 0")


def _impossible(worker: str, index: int, what: str) -> ImpossibleResponse:
    return ImpossibleResponse(
        f"worker {worker} returned an impossible response: choice {index} has {what}; nothing of "
        "it is stored"
    )
