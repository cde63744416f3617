"""Flags are derived from the fields of options classes, with their defaults, ranges and units."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from lockstep.cli.derived_flags import command_line, with_flags
from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.cli.serving.siblings import SiblingGateways
from lockstep.flags import Flag, check_ranges
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.options import GatewayOptions
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest


@dataclass(frozen=True, kw_only=True)
class Inner:
    cache_bytes: Annotated[int, Flag("Cache.", name="cache_mb", unit=1 << 20, min=1)] = 2 << 20
    roots: Annotated[tuple[Path, ...], Flag("Roots.", name="root")] = ()
    train_head: Annotated[bool, Flag("Leave out the head.")] = True

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class Outer:
    required: str
    hours: Annotated[float, Flag("Hours.", panel="Times")] = 1.5
    verbose: Annotated[bool, Flag("More text.")] = False
    inner: Inner = field(default_factory=Inner)
    without_flag: int = 7


def run(*arguments: str) -> tuple[Any, str]:
    """Run a command whose options are `Outer`; return what it got and what it printed."""
    received: list[Outer] = []
    app = typer.Typer()

    @app.command()
    @with_flags
    def command(name: str = "x", *, options: partial[Outer]) -> None:
        received.append(options(required=name))

    result = CliRunner().invoke(app, arguments)
    return (received[0] if received else None), result.output


def test_a_flag_has_the_default_of_its_field() -> None:
    assert run() == (Outer(required="x"), "")


def test_flags_set_fields_in_the_units_of_the_field() -> None:
    options, _ = run(
        "--name", "y", "--cache-mb", "3", "--root", "a", "--root", "b", "--no-train-head",
        "--hours", "2", "--verbose",
    )  # fmt: skip
    inner = Inner(cache_bytes=3 << 20, roots=(Path("a"), Path("b")), train_head=False)
    assert options == Outer(required="y", hours=2.0, verbose=True, inner=inner)


def test_a_range_is_checked_by_the_flag_and_by_the_class() -> None:
    options, output = run("--cache-mb", "0")
    assert options is None
    assert "--cache-mb" in output
    with pytest.raises(BadRequest, match="cache_bytes must be at least 1, got 0"):
        Inner(cache_bytes=0)


def test_a_command_line_repeats_the_flags_that_are_set() -> None:
    options = Outer(required="x", inner=Inner(cache_bytes=3 << 20, roots=(Path("a"),)))
    assert dict(command_line(options)) == {"--cache-mb": 3, "--root": [Path("a")]}
    assert dict(command_line(replace(options, verbose=True), frozenset({"root", "cache_mb"}))) == {
        "--verbose": True
    }


def test_further_gateways_get_the_options_of_the_first() -> None:
    arguments = GatewayArguments(
        gateways=2,
        store="postgresql://db",
        limit=("sessions=5", "messages=3"),
        gateway=GatewayOptions(port=9, session_seconds=7200.0, key_file=Path("keys")),
        pool=partial(Pool, max_in_flight=3),
    )
    passed = list(SiblingGateways(arguments, Settings())._passed_on())
    assert sorted(passed) == sorted([
        "--limit", "sessions=5", "--limit", "messages=3", "--session-hours", "2.0",
        "--key-file", str(Path("keys").absolute()), "--max-in-flight", "3",
    ])  # fmt: skip
