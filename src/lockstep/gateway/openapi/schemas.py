"""JSON schemas of wire structs, including unions of structs, which msgspec cannot describe."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

REFERENCE = "#/components/schemas/{name}"
MARK = "x-any-of"


def schemas_of(structs: Iterable[type]) -> tuple[dict[type, Any], dict[str, Any]]:
    """Return a reference for each struct, and the components that they refer to."""
    originals = list(dict.fromkeys(structs))
    rewriter = _UnionMarker()
    rewritten = [rewriter.rewrite(struct) for struct in originals]
    every = list(dict.fromkeys([*rewritten, *rewriter.structs_by_name.values()]))
    references, components = msgspec.json.schema_components(every, ref_template=REFERENCE)
    by_type = dict(zip(every, references, strict=True))
    structs_by_name = {name: by_type[kind] for name, kind in rewriter.structs_by_name.items()}
    _resolve(components, structs_by_name)
    return {
        struct: by_type[new] for struct, new in zip(originals, rewritten, strict=True)
    }, components


class _UnionMarker:
    """Rewrites structs: a mark that names the members replaces each union of several structs."""

    def __init__(self) -> None:
        self.structs_by_name: dict[str, Any] = {}
        self._rewritten: dict[Any, Any] = {}

    def rewrite(self, kind: Any) -> Any:
        """Return a type with its unions of structs marked; the type itself if it has none."""
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        arguments = get_args(kind)
        if get_origin(kind) in (Union, UnionType):
            structs = [kind for kind in arguments if isinstance(kind, type) and _is_struct(kind)]
            if len(structs) > 1:
                return self._mark(structs, NoneType in arguments)
            new = tuple(map(self.rewrite, arguments))
            return kind if new == arguments else Union[new]  # noqa: UP007
        if arguments and get_origin(kind) in (list, dict, tuple):
            new = tuple(map(self.rewrite, arguments))
            return kind if new == arguments else get_origin(kind)[new]
        return kind

    def _struct(self, struct: Any) -> Any:
        if struct in self._rewritten:
            return self._rewritten[struct]
        self._rewritten[struct] = struct
        fields = msgspec.structs.fields(struct)
        types = [self.rewrite(field.type) for field in fields]
        if any(new is not field.type for new, field in zip(types, fields, strict=True)):
            self._rewritten[struct] = msgspec.defstruct(
                struct.__name__,
                [
                    (field.name, new) if field.required else (field.name, new, _default(field))
                    for new, field in zip(types, fields, strict=True)
                ],
                module=struct.__module__,
                kw_only=True,
                namespace={"__doc__": struct.__doc__},
                forbid_unknown_fields=struct.__struct_config__.forbid_unknown_fields,
                tag=struct.__struct_config__.tag,
                tag_field=struct.__struct_config__.tag_field,
            )
        return self._rewritten[struct]

    def _mark(self, structs: list[Any], optional: bool) -> Any:
        names: list[str | None] = [
            f"{struct.__module__}.{struct.__qualname__}" for struct in structs
        ]
        self.structs_by_name.update(zip(map(str, names), map(self._struct, structs), strict=True))
        marked = [*names, None] if optional else names
        return Annotated[Any, msgspec.Meta(extra_json_schema={MARK: marked})]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return msgspec.field(default_factory=field.default_factory)


def _is_struct(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct)


def _resolve(node: Any, structs_by_name: dict[str, Any]) -> None:
    if isinstance(node, dict):
        if (names := node.pop(MARK, None)) is not None:
            node["anyOf"] = [structs_by_name[name] if name else {"type": "null"} for name in names]
        for value in node.values():
            _resolve(value, structs_by_name)
    elif isinstance(node, list):
        for value in node:
            _resolve(value, structs_by_name)
