"""A check that an adapter is trained on the weights that the fleet serves under it."""

from __future__ import annotations

import asyncio

from lockstep.checkpoint.probe import builtin
from lockstep.client.policy import connect
from lockstep.tokens.errors import Conflict
from lockstep.train.config import TrainConfig
from lockstep.train.learning.exactness import CLOSE_BOUND
from lockstep.train.learning.learner import Learner
from lockstep.train.retry import RetryPolicy


async def check_base(learner: Learner, url: str, config: TrainConfig, retry: RetryPolicy) -> None:
    """Raises Conflict when the base weights of trainer and fleet are not the same.

    The fleet would find out as well, but only by keeping every worker out.
    """
    model = learner.model
    text = model.config.get_text_config()
    ids = list(builtin(text.vocab_size, text.max_position_embeddings)[1])
    ours = await asyncio.to_thread(learner.base_logprobs, ids)
    async with connect(url, config.serve.model, api_key=config.serve.api_key) as base:
        scores = await retry.call("score", lambda _: base.score(ids))
    worst = max(abs(a - b) for a, b in zip(ours, scores.logprobs[1:], strict=True))
    tolerance = config.learner.probe_tolerance
    if tolerance is None:
        tolerance = 0.0 if learner.exact else CLOSE_BOUND[config.learner.dtype]
    if worst > tolerance:
        raise Conflict(
            f"the fleet serves version {scores.version!r}, whose logprobs are off by up to "
            f"{worst:.3g} from those of model {config.model!r}: an adapter trained on one does not "
            "fit the other; serve that model, or push its weights first",
            param="model",
        )
