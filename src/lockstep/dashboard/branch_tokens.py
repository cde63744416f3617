"""The tokens of a branch: text and author, and for sampled tokens logprob, version and mask."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from lockstep.ledger.branch_sample import branch_samples
from lockstep.ledger.lineage import Branch
from lockstep.ledger.tree import Node
from lockstep.render import Renderer
from lockstep.render.authors import authors, messages
from lockstep.tokens.errors import BadTokenId

PAGE_TOKENS = 4096


class MessageSpan(msgspec.Struct, frozen=True):
    """A message of the branch: the author of tokens [start, end), and their turn."""

    author: str
    turn: int
    start: int
    end: int


class TokenPage(msgspec.Struct, frozen=True):
    """Tokens [start, start + len(ids)) by columns. Repeated values are [value, count] pairs.

    `mask` says which tokens the branch's own samples train. Logprobs are None for tokens that were
    not sampled. `supports` are the sizes of the sets that tokens were drawn from: 0 where it was
    not recorded, None where nothing restricted it.
    """

    start: int
    total: int
    ids: list[int]
    texts: list[str]
    authors: list[list[Any]]
    sampled: list[list[Any]]
    mask: list[list[Any]]
    versions: list[list[Any]]
    turns: list[list[Any]]
    logprobs: list[float | None]
    supports: list[int | None]


@dataclass(frozen=True, slots=True)
class BranchTokens:
    """The tokens of one branch, ready to be shown by pages."""

    ids: array[int]
    texts: list[str]
    authors: list[str]
    sampled: list[bool]
    mask: list[bool]
    versions: list[str | None]
    turns: list[int]
    logprobs: list[float | None]
    supports: list[int | None]
    segments: list[MessageSpan]

    @classmethod
    def of(cls, nodes: Sequence[Node], branch: Branch, renderer: Renderer | None) -> BranchTokens:
        """Read the tokens. Without a renderer they have no text, and only sampled tokens an
        author.
        """
        path = branch.last.path()
        sampled: list[bool] = []
        turns: list[int] = []
        logprobs: list[float | None] = []
        supports: list[int | None] = []
        versions: list[str | None] = [None] * branch.last.end
        for node in path:
            sampled += [False] * len(node.prompt) + [True] * len(node.sampled)
            turns += [node.index] * (len(node.prompt) + len(node.sampled))
            logprobs += [None] * len(node.prompt)
            logprobs += node.logprobs
            supports += [None] * len(node.prompt)
            supports += _support_sizes(node)
            for span in node.versions:
                begin, end = node.sampled_start + span.start, node.sampled_start + span.end
                versions[begin:end] = [span.version] * (end - begin)
        ids = branch.last.ids()
        texts = token_texts(ids, renderer)
        written_by = authors(texts, sampled)
        return cls(
            ids, texts, written_by, sampled, _mask(nodes, branch, len(ids)), versions, turns,
            logprobs, supports, list(_segments(texts, written_by, turns)),
        )  # fmt: skip

    def page(self, start: int, end: int) -> TokenPage:
        """Return at most PAGE_TOKENS tokens, from `start` on."""
        here = slice(start, min(end, start + PAGE_TOKENS))
        return TokenPage(
            start=start,
            total=len(self.ids),
            ids=self.ids[here].tolist(),
            texts=self.texts[here],
            authors=runs(self.authors[here]),
            sampled=runs(self.sampled[here]),
            mask=runs(self.mask[here]),
            versions=runs(self.versions[here]),
            turns=runs(self.turns[here]),
            logprobs=self.logprobs[here],
            supports=self.supports[here],
        )


def runs(values: Iterable[Any]) -> list[list[Any]]:
    """Return the run lengths of `values` as [value, count] pairs."""
    return [[value, len(list(group))] for value, group in groupby(values)]


def token_texts(ids: Iterable[int], renderer: Renderer | None) -> list[str]:
    """Return the string of each token; empty without a renderer or for an id that has none."""
    if renderer is None:
        return ["" for _ in ids]
    text_by_id: dict[int, str] = {}
    texts = []
    for token in ids:
        if token not in text_by_id:
            try:
                text_by_id[token] = renderer.pieces.piece(token).text
            except BadTokenId:
                text_by_id[token] = ""
        texts.append(text_by_id[token])
    return texts


def _support_sizes(node: Node) -> list[int | None]:
    if node.support is not None:
        sizes: list[int | None] = node.support.sizes().tolist()
        return sizes
    restricted = node.shaping is not None and node.shaping.restricts
    return [0 if restricted else None] * len(node.sampled)


def _mask(nodes: Sequence[Node], branch: Branch, total: int) -> list[bool]:
    mask = [False] * total
    for sample in branch_samples(nodes, train_aborted=False, dedupe=True):
        if sample.branch == branch.number:
            for at, trained in enumerate(sample.sampled_mask):
                mask[at] = mask[at] or trained
    return mask


def _segments(
    texts: Sequence[str], written_by: Sequence[str], turns: Sequence[int]
) -> Iterator[MessageSpan]:
    for author, start, end in messages(texts, written_by):
        # Sampled tokens belong to the turn in which they end: its prompt opened the message.
        yield MessageSpan(author, turns[end - 1], start, end)
