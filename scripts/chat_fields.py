"""Writes the table of chat fields into docs/gateway.md: what becomes of each, as the code has it.

python scripts/chat_fields.py --write    # rewrite the table
python scripts/chat_fields.py --check    # fail unless it is up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from lockstep.protocol.common.sampling_fields import SamplingFields
from lockstep.protocol.openai.chat_decode import NEUTRAL
from lockstep.protocol.openai.chat_request import RECORDED, WITHOUT_EFFECT, ChatRequest

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
BEGIN = "<!-- chat fields: written by scripts/chat_fields.py --write, from the code -->"
END = "<!-- end of chat fields -->"
BY_TEMPLATE = ("reasoning_effort", "verbosity", "chat_template_kwargs")
OLDER = {"functions": "tools", "function_call": "tool_choice"}


def treatment(field: str) -> tuple[str, str]:
    """What becomes of a field, and at which values."""
    if field in NEUTRAL:
        values = [f"`{msgspec.json.encode(value).decode()}`" for value in NEUTRAL[field]]
        return "refused", f"unless null{''.join(f' or {value}' for value in values)}"
    if field in RECORDED:
        return "recorded", "kept with the turn of a session, in `notes` of its sample"
    if field in WITHOUT_EFFECT:
        return "accepted", "shapes what chat never shows"
    if field in BY_TEMPLATE:
        return "honoured", "where the model's chat template has such a variable, else refused"
    if field in OLDER:
        return "honoured", f"read as `{OLDER[field]}`, answered in the older shape"
    return "honoured", "for sampling" if field in SamplingFields.__struct_fields__ else ""


def table() -> str:
    rows: dict[tuple[str, str], list[str]] = {}
    for field in ChatRequest.__struct_fields__:
        rows.setdefault(treatment(field), []).append(f"`{field}`")
    order = {"honoured": 0, "recorded": 1, "accepted": 2, "refused": 3}
    lines = ["| what happens | fields | when |", "|---|---|---|"]
    for (what, when), fields in sorted(rows.items(), key=lambda row: order[row[0][0]]):
        lines.append(f"| {what} | {', '.join(fields)} | {when} |")
    return "\n".join(lines)


def page() -> str:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{PAGE} has no place for the table: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    elif page() != PAGE.read_text():
        raise SystemExit(f"{PAGE} is not up to date: python scripts/chat_fields.py --write")


if __name__ == "__main__":
    main()
