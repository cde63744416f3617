"""The fleet as a table in the terminal: one line per worker, details on demand."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lockstep.cli.output import one_line_table

COLOURS = {"serving": "green", "quarantined": "red", "draining": "yellow"}
LAST_OPERATIONS = 3


def fleet_view(state: dict[str, Any], *, details: bool = False) -> RenderableType:
    """Render the state of a fleet (GET /v1/rl/state): a summary, the workers, and the last
    operations.

    `details` adds the URLs of workers, their full reasons, and the results of operations.
    """
    rows = [
        (
            row["id"],
            Text(row["state"], style=COLOURS.get(row["state"], "cyan")),
            str(row["version"]),
            str(row["in_flight"]),
            _why(row),
        )
        for row in state["workers"]
    ]
    rows += [
        (worker["id"], Text("refused", style="red"), "-", "-", worker["reason"])
        for worker in state.get("refused", ())
    ]
    last = [_operation(operation) for operation in state["operations"][:LAST_OPERATIONS]]
    return Group(
        Text(_summary(state), style="bold"),
        *(Text(line) for line in _leadership(state)),
        one_line_table(("worker", "state", "version", "in flight", "why"), rows),
        Text("last: " + ("; ".join(last) or "nothing yet"), style="dim"),
        *(Text(line) for line in (_details(state) if details else ())),
    )


def _summary(state: dict[str, Any]) -> str:
    paused = f", paused ({state['paused']})" if state["paused"] else ""
    adapters = "".join(f", {name}@{label}" for name, label in state["adapters"].items())
    running = f", now: {', '.join(state['running'])}" if state["running"] else ""
    return (
        f"version {state['version']}{adapters}: {state['serving']} of "
        f"{len(state['workers'])} serving{paused}{running}"
    )


def _leadership(state: dict[str, Any]) -> list[str]:
    """Describe the leading gateway if several share the fleet, and whether this one was
    superseded.
    """
    lines = []
    if state.get("role", "alone") != "alone":
        leader = state["leader"] or "nobody yet"
        does = "leads the fleet" if state["role"] == "leader" else f"follows {leader}"
        alive = ", ".join(gateway["address"] for gateway in state["gateways"])
        lines.append(f"this gateway {does} (generation {state['generation']}); gateways: {alive}")
    if state.get("superseded"):
        lines.append(
            "another gateway commands the workers: this one changes nothing any more; stop one of "
            "them, or give both the same --store"
        )
    return lines


def _details(state: dict[str, Any]) -> list[str]:
    lines = []
    for row in state["workers"]:
        lines += ["", f"{row['id']}: {row['state']}, version {row['version']}"]
        lines += [
            f"  {name.replace('_', ' ')}: {row[name]}"
            for name in ("url", "admin_url", "backend")
            if row.get(name)
        ]
        lines += [f"  GPUs: {', '.join(row['gpus'])}"] if row.get("gpus") else []
        lines += [f"  why: {_why(row)}"] if row["reason"] else []
    lines += ["", "operations, newest first:"] if state["operations"] else []
    for operation in state["operations"]:
        lines.append(
            f"  {_operation(operation)}" + (f": {operation['error']}" if operation["error"] else "")
        )
        lines += [f"    warning: {warning}" for warning in operation.get("warnings", ())]
        lines += [
            f"    {name}: {result['status']}{_proof(result)}"
            for name, result in (operation.get("workers") or {}).items()
            if result["status"] != "ok" or result.get("evidence")
        ]
    return lines


def _proof(result: dict[str, Any]) -> str:
    """Describe why a worker failed, and the evidence for or against its new weights."""
    error = f": {result.get('error')}" if result["status"] != "ok" else ""
    evidence = result.get("evidence")
    if not evidence:
        return error
    facts = [f"decided by {evidence['decided_by'] or 'nothing'}"]
    if evidence["max_difference"] is not None:
        facts.append(f"logprobs off by up to {evidence['max_difference']:.3g}")
    if evidence["bound"] is not None:
        facts.append(f"allowed {evidence['bound']:.3g}")
    facts.append(f"digest {evidence['digest']}")
    if evidence.get("scope"):
        facts.append(evidence["scope"])
    return f"{error} ({', '.join(facts)})"


def _why(row: dict[str, Any]) -> str:
    later = row["next_try_seconds"]
    tried = f" (next try in {later:.0f} s)" if later is not None else ""
    return f"{row['reason'] or ''}{tried}"


def _operation(operation: dict[str, Any]) -> str:
    pause = (
        f", paused {operation['pause_seconds'] * 1e3:.0f} ms" if operation["pause_seconds"] else ""
    )
    return f"{operation['kind']} {operation['version'] or ''} {operation['status']}{pause}"
