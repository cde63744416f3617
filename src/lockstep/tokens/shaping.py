"""Options that shaped the distribution of sampled tokens: what a scorer needs to reproduce it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lockstep.tokens.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Options besides the temperature that change the distribution of sampled tokens.

    With these and the temperature, processed logprobs can be recomputed from the model's logits.
    `end_ids` must not occur before `min_tokens`, nor where the grammar cannot end. The defaults
    change nothing.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()

    @property
    def changes(self) -> str:
        """The options that are not at their defaults, such as "top_p 0.9, top_k 20"."""
        values = {own.name: getattr(self, own.name) for own in fields(self)}
        changed = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            if isinstance(value, int) else name
            for name, value in values.items()
            if name != "end_ids" and value != getattr(UNSHAPED, name)
        ]  # fmt: skip
        return ", ".join(changed)

    @property
    def truncates(self) -> bool:
        """Whether the tokens that could be drawn depend on the weights."""
        return bool(self.top_p < 1 or self.top_k or self.min_p)

    @property
    def restricts(self) -> bool:
        """Whether some tokens could not be drawn. Penalties and biases only change weights."""
        return bool(
            self.truncates
            or self.allowed_token_ids is not None
            or self.grammar is not None
            or self.min_tokens
        )


UNSHAPED = Shaping()


@dataclass(frozen=True, slots=True)
class ShapedSpan:
    """Tokens [start, end) drawn under `shaping` in one request whose prompt ended at `start`.

    Penalties and `min_tokens` count from `start` on.
    """

    start: int
    end: int
    shaping: Shaping
