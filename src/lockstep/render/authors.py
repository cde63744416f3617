"""Author of each token of a conversation, read from the markers of its chat format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
TOOL_OPEN, TOOL_CLOSE = "<tool_response>", "</tool_response>"
AUTHORS = ("system", "user", "assistant", "tool")
TEMPLATE = "template"


def authors(strings: Sequence[str], sampled: Sequence[bool]) -> list[str]:
    """Return the author of each token: system, user, assistant, tool, or the template around them.

    Sampled tokens belong to the assistant in every format. The rest is read from ChatML markers; in
    other formats it belongs to the template.
    """
    written_by: list[str] = []
    role, naming, name = TEMPLATE, False, ""
    for text, was_sampled in zip(strings, sampled, strict=True):
        if was_sampled:
            written_by.append("assistant")
            role = TEMPLATE if text == CLOSE else role
            continue
        if text == OPEN:
            role, naming, name = TEMPLATE, True, ""
            written_by.append(TEMPLATE)
        elif naming:
            # The role's name extends to the end of its line, possibly over several tokens.
            written_by.append(TEMPLATE)
            name, naming = name + text, "\n" not in text
            role = name.strip() if name.strip() in AUTHORS else TEMPLATE
        elif text == CLOSE:
            written_by.append(TEMPLATE)
            role = TEMPLATE
        elif text in (TOOL_OPEN, TOOL_CLOSE):
            written_by.append(TEMPLATE)
            role = "tool" if text == TOOL_OPEN else "user"
        else:
            written_by.append(role)
    return written_by


def messages(strings: Sequence[str], written_by: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Return the author and span of each message, including the template's tokens around it."""
    start, author = 0, TEMPLATE
    for at, (text, by) in enumerate(zip(strings, written_by, strict=True)):
        other = by not in (TEMPLATE, author) and author != TEMPLATE
        if at > start and (other or (text == OPEN and by == TEMPLATE)):
            yield author, start, at
            start, author = at, TEMPLATE
        if by != TEMPLATE:
            author = by
    if len(strings) > start:
        yield author, start, len(strings)
