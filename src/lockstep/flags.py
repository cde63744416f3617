"""Declaration of command-line flags on the fields of options classes.

    @dataclass(frozen=True, kw_only=True)
    class EngineOptions:
        max_seqs: Annotated[int, Flag("Most sequences in one batch.", min=1)] = 64

`lockstep.cli.derived_flags` makes the flag `--max-seqs` of it. This module imports no CLI library,
so that every package can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from lockstep.tokens.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line flag of an option: its help text and the panel of the help page.

    `name` is its parameter name if that is not the field's: `name="max_loras"` is `--max-loras`. A
    flag may count in units of its field: `unit=1 << 20` gives a field in bytes a flag in megabytes.
    `min` is the smallest value of the field. A boolean field whose default is true gets the flag
    `--no-NAME`, and a tuple a flag that may be repeated.
    """

    help: str
    panel: str | None = None
    name: str | None = None
    unit: int = 1
    min: int | None = None


def flag_of(annotation: Any) -> Flag | None:
    """Return the flag in the metadata of an annotation, if it has one."""
    metadata = getattr(annotation, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Flag)), None)


def check_ranges(options: Any) -> None:
    """Raise BadRequest for a field of `options` that is smaller than the `min` of its flag."""
    options_class: Any = type(options)
    for name, least in _minima(options_class).items():
        value = getattr(options, name)
        if value < least:
            expected = "must not be negative" if least == 0 else f"must be at least {least}"
            raise BadRequest(f"{name} {expected}, got {value}", param=name)


@cache
def _minima(options: Any) -> dict[str, int]:
    flags = {
        name: flag_of(annotation)
        for name, annotation in get_type_hints(options, include_extras=True).items()
    }
    return {name: flag.min for name, flag in flags.items() if flag and flag.min is not None}
