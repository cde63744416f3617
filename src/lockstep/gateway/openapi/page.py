"""The page at /docs: the routes and types of an OpenAPI document, as one file of HTML.

It is our own because stock pages (Swagger UI, Redoc) are 1 to 3 MB of JavaScript, which they load
from a CDN: a gateway has to serve this page without a network, and no script at all is safer there.
"""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
code { font-family: ui-monospace, monospace; font-size: .92em }
details { border: 1px solid #ddd; border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem }
summary { cursor: pointer } summary b { display: inline-block; min-width: 3.5rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 }
td, th { text-align: left; vertical-align: top; padding: .15rem .6rem .15rem 0;
  border-top: 1px solid #eee }
p.note { color: #666 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 }
  details { border-color: #444 } td, th { border-color: #333 } p.note { color: #999 } }
"""


def page(document: dict[str, Any]) -> str:
    """Return the HTML page, which loads nothing else."""
    schemas = document["components"]["schemas"]
    routes = "".join(
        _route(method, path, operation)
        for path, methods in document["paths"].items()
        if not path.startswith("/sessions/")
        for method, operation in methods.items()
    )
    types = "".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}</title><style>{STYLE}</style></head><body>"
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
        '<p class="note">As JSON: <a href="/openapi.json">/openapi.json</a>. '
        "Routes that may join a session are also served under "
        "<code>/sessions/{session}</code>.</p>"
        f"<h2>Routes</h2>{routes}<h2>Types</h2>{types}</body></html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    contents = next(iter(operation["responses"].values()))["content"]
    parts = []
    if body is not None:
        parts.append(f"<p>Request: {_type(body['schema'])}</p>")
    kinds = ", ".join(
        _type(content["schema"]) if kind == "application/json" else f"<code>{escape(kind)}</code>"
        for kind, content in contents.items()
    )
    parts.append(f"<p>Response: {kinds}</p>")
    return (
        f"<details><summary><b>{escape(method.upper())}</b> <code>{escape(path)}</code> "
        f"{escape(operation['summary'])}</summary>{''.join(parts)}</details>"
    )


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{_type(value)}</td>"
        f"<td>{'required' if field in required else _default(value)}</td></tr>"
        for field, value in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<p>{about}</p><table>{rows}</table></details>"
    )


def _default(schema: dict[str, Any]) -> str:
    return f"default <code>{escape(repr(schema['default']))}</code>" if "default" in schema else ""


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items")
        return f"list of {_type(items)}" if isinstance(items, dict) else "list"
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        return f"map to {_type(values)}"
    return escape(kind if isinstance(kind, str) else " or ".join(kind))
