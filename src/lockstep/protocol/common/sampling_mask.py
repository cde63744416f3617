"""The support of sampled tokens in responses: vLLM's field `sampling_mask`.

As lists of ids in ascending order, as vLLM sends them, or packed, as Lockstep's parts send them to
each other. An empty list is the whole vocabulary.
"""

from __future__ import annotations

from lockstep.tokens import Support
from lockstep.tokens.support import PackedSupport

SupportField = list[list[int]] | PackedSupport | None


def support_field(support: Support | None, form: str | None) -> SupportField:
    """Return the field: `lists`, `packed`, or None where nothing was requested or recorded."""
    if support is None or form is None:
        return None
    return PackedSupport.of(support) if form == "packed" else support.lists()


def read_support(field: SupportField) -> Support | None:
    """Return the support of a response. Raises BadSupport if it is malformed."""
    if field is None:
        return None
    return field.value() if isinstance(field, PackedSupport) else Support.of_ids(field)
