"""Command-line flags derived from options classes, whose fields declare them as `Flag`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import typer

from lockstep.flags import Flag, flag_of

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A bundled model (tiny, tiny-moe) or a directory with a Hugging Face model."
    ),
]


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the options classes in the signature of a command by the flags of their fields.

        @with_flags
        def worker(model: ModelArgument = "tiny", *, options: WorkerOptions) -> None: ...

    The command gets an instance of each class. A parameter `partial[X]` gets a partial call of `X`
    with the values of the flags, for the command to complete.
    """
    groups: dict[str, OptionGroup] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if (group := OptionGroup.of(parameter.annotation)) is None:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        else:
            groups[parameter.name] = group
            parameters += group.parameters()

    def run(**values: Any) -> None:
        options = {name: group.build(values) for name, group in groups.items()}
        command(**values, **options)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def command_line(options: Any, skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every flag that `options` has set to something else than its default.

    Flags in `skip` are left out. A boolean flag has the value True, a repeated one a list.
    """
    group = OptionGroup.of(type(options))
    if group is None:
        raise TypeError(f"{type(options).__name__} declares no flags")
    for flag, value in group.values(options):
        if value != flag.parameter.default and flag.name not in skip:
            yield f"--{flag.name.replace('_', '-')}", value


@dataclass(frozen=True, slots=True)
class DerivedFlag:
    """The flag of one field, with conversions between the values of the two."""

    field: inspect.Parameter
    flag: Flag

    @property
    def _kind(self) -> Any:
        return self.field.annotation.__origin__

    @property
    def name(self) -> str:
        """The name of the parameter that Typer sees."""
        name = self.flag.name or self.field.name
        return f"no_{name}" if self.field.default is True else name

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter from which Typer makes the flag."""
        kind, default = self._kind, self.to_flag(self.field.default)
        declarations: tuple[str, ...] = ()
        if kind is bool:  # by its name: Typer would add a second flag, --no-NAME
            declarations = (f"--{self.name.replace('_', '-')}",)
        elif get_origin(kind) is tuple:
            kind = list[get_args(kind)[0]] | None  # type: ignore[misc]
        least = None if self.flag.min is None else -(-self.flag.min // self.flag.unit)
        option = typer.Option(
            *declarations, help=self.flag.help, rich_help_panel=self.flag.panel, min=least
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )

    def to_flag(self, value: Any) -> Any:
        """Return the value of the flag for a value of the field."""
        if isinstance(value, bool):
            return value is not self.field.default
        if isinstance(value, tuple):
            return list(value) or None
        return type(value)(value / self.flag.unit) if self.flag.unit != 1 else value

    def to_field(self, value: Any) -> Any:
        """Return the value of the field for a value of the flag."""
        if isinstance(value, bool):
            return value is not self.field.default
        if get_origin(self._kind) is tuple:
            return tuple(value or ())
        return value * self.flag.unit if self.flag.unit != 1 else value


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The flags of an options class and of the options classes that are its fields."""

    make: Callable[..., Any]
    members: dict[str, DerivedFlag | OptionGroup]
    completed_later: bool

    @classmethod
    def of(cls, annotation: Any) -> OptionGroup | None:
        """Return the flags of a dataclass, or of X in `partial[X]`; None for any other type."""
        later = get_origin(annotation) is partial
        make = get_args(annotation)[0] if later else annotation
        if not later and not is_dataclass(make):
            return None
        members: dict[str, DerivedFlag | OptionGroup] = {}
        for field in inspect.signature(make, eval_str=True).parameters.values():
            if (flag := flag_of(field.annotation)) is not None:
                members[field.name] = DerivedFlag(field, flag)
            elif (group := cls.of(field.annotation)) is not None and group.members:
                members[field.name] = group
        return cls(make, members, later)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield the parameters of all flags."""
        for member in self.members.values():
            if isinstance(member, OptionGroup):
                yield from member.parameters()
            else:
                yield member.parameter

    def build(self, values: dict[str, Any]) -> Any:
        """Take the flags of this group out of `values` and return its options."""
        fields = {
            name: member.build(values)
            if isinstance(member, OptionGroup)
            else member.to_field(values.pop(member.name))
            for name, member in self.members.items()
        }
        return partial(self.make, **fields) if self.completed_later else self.make(**fields)

    def values(self, options: Any) -> Iterator[tuple[DerivedFlag, Any]]:
        """Yield every flag with its value in `options`."""
        for name, member in self.members.items():
            if isinstance(member, OptionGroup):
                yield from member.values(getattr(options, name))
            elif self.completed_later:
                yield member, member.to_flag(options.keywords.get(name, member.field.default))
            else:
                yield member, member.to_flag(getattr(options, name))
