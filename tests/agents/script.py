"""What the scripted worker says to each agent: a task of three turns with tools, then an end."""

from __future__ import annotations

from typing import Any

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
COMMANDS = (("echo hello > out.txt",), ("cat out.txt",), ("ls", "pwd"))
Rule = dict[str, Any]


def rules() -> list[Rule]:
    """First what fails once, then the turns of each agent, told apart by the tools they bring."""
    return [
        {"when": {"last": "fails once"}, "error": {"status": 500}, "times": 1},
        {"when": {"last": "Thanks"}, "say": "You are welcome."},
        *_helper(),
        *_child("task", "general"),
        *_child("agent", "general-purpose"),
        {"when": {"last": "<analysis>"}, "say": "<state_snapshot>so far</state_snapshot>"},
        {"when": {"prompt": "<state_snapshot>so far"}, "say": "Done after the summary."},
        {"when": {"last": "CONTEXT CHECKPOINT COMPACTION"}, "say": "the summary so far"},
        {"when": {"prompt": "the summary so far", "turn": 0}, "say": "Done after the summary."},
        *_turns("bash", [SUBMIT], "command", end=f"echo {SUBMIT}"),
        *_turns("exec_command", [], "cmd"),
        *_turns("run_shell_command", [], "command", description="step", is_background=False),
        *_turns("bash", [], "command", description="step"),
        *_turns("shell", [], "command"),
        {"say": "A title"},
    ]


def _helper() -> list[Rule]:
    """Codex has a sub-agent look at the file, waits for it and ends."""
    space, main = "multi_agent_v1", {"prompt": "with a helper"}
    spawn = {"name": f"{space}.spawn_agent", "arguments": {"message": "Report the bug."}}
    waited = {"targets": ["{{1}}"], "timeout_ms": 20000}
    wait = {"name": f"{space}.wait_agent", "arguments": waited}
    return [
        {"when": {"last": "Report the bug"}, "say": "child report: add subtracts"},
        {"when": {**main, "turn": 0}, "calls": [spawn]},
        {"when": {**main, "last": '"agent_id":"([^"]+)"'}, "calls": [wait]},
        {"when": {**main, "last": "child report"}, "say": "Done with the helper."},
    ]


def _child(tool: str, kind: str) -> list[Rule]:
    """opencode and Qwen Code have a child look at the file and end with what it found."""
    main = {"prompt": ["with a child", f'"name": "{tool}"']}
    arguments = {"description": "inspect", "prompt": "Report the bug.", "subagent_type": kind}
    return [
        {"when": {**main, "turn": 0}, "calls": [{"name": tool, "arguments": arguments}]},
        {"when": {**main, "last": "child report"}, "say": "Done with the child."},
    ]


def _turns(
    tool: str, marks: list[str], key: str, end: str | None = None, **more: Any
) -> list[Rule]:
    def calls(*commands: str) -> list[Rule]:
        return [{"name": tool, "arguments": {key: each, **more}} for each in commands]

    prompt = [f'"name": "{tool}"', *marks]
    turns: list[Rule] = [
        {"when": {"prompt": prompt, "turn": at}, "think": f"Step {at}.", "calls": calls(*commands)}
        for at, commands in enumerate(COMMANDS)
    ]
    last: Rule = {"say": "All done."} if end is None else {"calls": calls(end)}
    return [*turns, {"when": {"prompt": prompt}, **last}]
