"""Options that several commands share: declared once, as the fields of a dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints


def takes(
    options: type[Any], parameter: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of `options` as options, passed to it as one `parameter`.

    Typer reads a command's signature, so the command gets one that has them beside its own.
    """
    hints = get_type_hints(options, include_extras=True)
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)
    ]

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [*(one for one in own if one.name != parameter), *shared]

        def run(**values: Any) -> None:
            value = options(**{one.name: values.pop(one.name) for one in shared})
            command(**values, **{parameter: value})

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return with_options
