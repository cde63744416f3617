"""Weight versions: present on every token, and enforced when a request requires one."""

from __future__ import annotations

from lockstep.check.inflight import in_flight
from lockstep.check.outcome import NotApplicable, require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target
from lockstep.protocol.common.response import UNKNOWN_VERSION
from lockstep.tokens import Completion

GROUP = RowGroup("versions")


def spans(completion: Completion) -> str:
    """Return the version spans as text for the evidence."""
    return ", ".join(f"{span.version!r} [{span.start}, {span.end})" for span in completion.versions)


@GROUP.row("every", "every token has the version of the weights it was sampled with", "L3")
async def every(target: Target) -> str:
    whole = await target.one(target.prompt(), max_tokens=12)
    async with in_flight(target, target.request(target.prompt(), max_tokens=12)) as running:
        streamed = await running.end()
    for what, completion in (("whole", whole), ("streamed", streamed)):
        labelled = all(span.version not in (UNKNOWN_VERSION, "") for span in completion.versions)
        require(
            labelled,
            f"the {what} answer tells no version for its {len(completion.token_ids)} tokens",
        )
    cards = await target.transport.models()
    card = next((candidate for candidate in cards if candidate.id == target.card.id), target.card)
    evidence = f"whole {spans(whole)}; streamed {spans(streamed)}"
    if card.weight_version is not None:
        require(
            {span.version for span in whole.versions} == {card.weight_version},
            f"{evidence}; but /v1/models says {card.weight_version!r}",
        )
        evidence += f"; /v1/models says {card.weight_version!r}"
    return evidence


@GROUP.row("demand", "a request may require a version, and gets it or an error", "L3 F43")
async def demand(target: Target) -> str:
    ids = target.prompt()
    reply = await target.send_ids(ids, weight_version="no-such-version")
    if reply.status == 200:
        require(False, "weight_version 'no-such-version' was demanded, and ignored: 200")
    require(reply.refused, f"weight_version 'no-such-version': {reply.describe()}")
    now = (await target.one(ids, max_tokens=1)).versions[-1].version
    right = await target.send_ids(ids, weight_version=now)
    if right.refused:
        raise NotApplicable(f"the field is not known here, and it says so: {right.describe()}")
    require(right.status == 200, f"the version served, {now!r}: {right.describe()}")
    return f"'no-such-version': {reply.describe()}; {now!r}: 200"
