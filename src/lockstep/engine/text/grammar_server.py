"""Program of the grammar server, which forks one limited process for each grammar.

Run by `grammar_process`, as a script: importing it from the package would load torch. The compiler
of grammars is native code that recurses and allocates as the grammar says. Here a grammar that
crashes it, or never ends, costs its own process only: the kernel ends a process past its limits.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

LENGTH = struct.Struct("<I")
"""Prefix of a message of variable length."""
COMMAND = struct.Struct("<ci")
"""A command to the server: b"f" fork for the socket sent along, b"s" return a pid's exit status."""
REPLY = struct.Struct("<i")
STEP = struct.Struct("<cIi")
"""A step of a grammar process: b"n" new matcher, b"t" next token, b"d" delete; matcher; token."""
STATE = struct.Struct("<IBI")
"""State of a matcher after a step: its number, flags, and bytes of the mask or error behind it."""
STOPPED, ACCEPTING, FAILED = 1, 2, 4
CROWDED = signal.SIGUSR1
"""Signal that ends the process with the most memory when all together need too much."""
LOOK_SECONDS, LOOK_AGAIN_SECONDS = 0.25, 0.02
"""Intervals between looks at the memory of all processes: usually, and past half of the limit."""

JSON_OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"( |\n[ \t]{0,20})?"}
"""Whitespace between the tokens of JSON: a space, or a line break and indentation.

With more, a model may emit whitespace until max_tokens. A schema sets its own as `x-guidance`."""


class Limits(msgspec.Struct):
    """Limits of one grammar process.

    `memory_bytes` is on top of what the server uses, and so is `total_bytes`, which bounds all
    processes of a server together. A step takes its CPU time from a budget of `step_seconds`, to
    which each step adds `refill_seconds`.
    """

    compile_seconds: float
    step_seconds: float
    refill_seconds: float
    memory_bytes: int
    total_bytes: int
    stack_bytes: int


class Setup(msgspec.Struct):
    """The vocabulary of a model, and the limits of a grammar."""

    tokenizer: str
    tokens: list[bytes]
    special_ids: list[int]
    eos_id: int
    limits: Limits


class GrammarSource(msgspec.Struct):
    """A grammar as the compiler reads it: its kind is json, regex or lark."""

    kind: str
    text: str


class _Tokens:
    """The vocabulary in the form that llguidance reads. Special tokens have no text."""

    bos_token_id = None

    def __init__(self, setup: Setup) -> None:
        from tokenizers import Tokenizer

        self.tokens = setup.tokens
        self.special_token_ids = setup.special_ids
        self.eos_token_id = setup.eos_id
        self._encode = Tokenizer.from_file(setup.tokenizer).encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text, add_special_tokens=False).ids)


class _CpuBudget:
    """CPU seconds that this process may use. The kernel ends it with SIGPROF past them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._left = limits.step_seconds

    def begin_compile(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._limits.compile_seconds)

    def begin_step(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._left)

    def end_compile(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def end_step(self) -> None:
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        self._left = min(left + self._limits.refill_seconds, self._limits.step_seconds)


def read(sock: socket.socket, count: int) -> bytes:
    """Return exactly `count` bytes. Raises EOFError when the other side has closed."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def read_message(sock: socket.socket) -> bytes:
    """Return a message with a length prefix."""
    (length,) = LENGTH.unpack(read(sock, LENGTH.size))
    return read(sock, length)


def write_message(sock: socket.socket, message: bytes) -> None:
    sock.sendall(LENGTH.pack(len(message)) + message)


def main(control: socket.socket) -> None:
    """Fork grammar processes until the worker closes its side."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides when to end
    setup = msgspec.msgpack.decode(read_message(control), type=Setup)
    _limit(resource.RLIMIT_STACK, setup.limits.stack_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    from llguidance import LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(setup)))
    control.sendall(REPLY.pack(0))
    children: dict[int, int | None] = {}
    commands = select.poll()
    commands.register(control.fileno(), select.POLLIN)
    wait = LOOK_SECONDS
    while True:
        if not commands.poll(wait * 1000 if children else None):
            wait = _bound_memory(children, setup.limits.total_bytes)
            continue
        command, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not command:
            return
        name, pid = COMMAND.unpack(command)
        _reap(children)
        if name == b"s":
            control.sendall(REPLY.pack(_status(children, pid)))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _run_child(socket.socket(fileno=descriptors[0]), tokenizer, setup.limits)
        os.close(descriptors[0])
        children[pid] = None
        control.sendall(REPLY.pack(pid))


def _bound_memory(children: dict[int, int | None], most: int) -> float:
    """End the largest process if all need more memory than `most`; return when to look again."""
    _reap(children)
    own = _resident(os.getpid())
    # Memory that a process shares with the server since the fork is not counted.
    sizes = {pid: max(_resident(pid) - own, 0) for pid, ended in children.items() if ended is None}
    total = sum(sizes.values())
    if total > most:
        os.kill(max(sizes, key=sizes.__getitem__), CROWDED)
    return LOOK_AGAIN_SECONDS if total > most // 2 else LOOK_SECONDS


def _resident(pid: int) -> int:
    """Return the bytes of memory that a process holds, or 0 where the system does not tell."""
    with suppress(OSError), open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
    return 0


def _reap(children: dict[int, int | None]) -> None:
    """Collect the exit statuses of the processes that have ended."""
    for pid in [pid for pid, status in children.items() if status is None]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended and status:
            children[pid] = status
        elif ended:
            del children[pid]  # the worker closed it, and will not ask for its status


def _status(children: dict[int, int | None], pid: int) -> int:
    """Return the wait status of a process, ending it if it still runs."""
    if pid not in children:
        return 0
    status = children.pop(pid)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return status


def _run_child(conn: socket.socket, tokenizer: Any, limits: Limits) -> NoReturn:
    status = 1
    try:
        if used := _address_space():
            _limit(resource.RLIMIT_AS, used + limits.memory_bytes + limits.stack_bytes)
        _serve(conn, tokenizer, _CpuBudget(limits))
        status = 0
    except (EOFError, ConnectionError):
        status = 0
    except MemoryError:
        status = 2
    finally:
        # Not sys.exit: the handlers and buffers of the server must not run a second time.
        os._exit(status)


def _serve(conn: socket.socket, tokenizer: Any, budget: _CpuBudget) -> None:
    """Compile the grammar of the first message, then advance its matchers."""
    from llguidance import LLMatcher

    source = msgspec.msgpack.decode(read_message(conn), type=GrammarSource)
    budget.begin_compile()
    try:
        compiled = LLMatcher(tokenizer, _grammar(source), log_level=0)
        error = compiled.get_error() if compiled.is_error() else ""
    except (ValueError, RecursionError) as failure:
        error = f"the schema is no JSON: {failure}"
    budget.end_compile()
    write_message(conn, error.encode())
    if error:
        return
    matchers: dict[int, Any] = {}
    while True:
        name, number, token = STEP.unpack(read(conn, STEP.size))
        if name == b"d":
            matchers.pop(number, None)
            continue
        budget.begin_step()
        if name == b"n":
            matchers[number] = compiled.deep_copy()
        else:
            matchers[number].consume_token(token)
        state = _state(number, matchers[number])
        budget.end_step()
        conn.sendall(state)


def _grammar(source: GrammarSource) -> str:
    from llguidance import LLMatcher

    match source.kind:
        case "json":
            schema = msgspec.json.decode(source.text)
            own = isinstance(schema, dict) and "x-guidance" in schema
            defaults = None if own else JSON_OPTIONS  # they would be mixed with the schema's own
            return str(LLMatcher.grammar_from_json_schema(source.text, defaults=defaults))
        case "regex":
            return str(LLMatcher.grammar_from_regex(source.text))
        case _:
            return str(LLMatcher.grammar_from_lark(source.text))


def _state(number: int, matcher: Any) -> bytes:
    """Return the state of a matcher with the mask of its next token."""
    mask = b"" if matcher.is_stopped() else bytes(matcher.compute_bitmask())
    if matcher.is_error():
        error: bytes = matcher.get_error().partition("\n")[0].encode()[:1000]
        return STATE.pack(number, STOPPED | FAILED, len(error)) + error
    flags = STOPPED * matcher.is_stopped() | ACCEPTING * matcher.is_accepting()
    return STATE.pack(number, flags, len(mask)) + mask


def _limit(kind: int, value: int) -> None:
    # Some systems do not know every limit; there, the CPU budget is the one that holds.
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (soft, hard if kind == resource.RLIMIT_STACK else soft))


def _address_space() -> int:
    """Return the bytes of address space in use, or 0 where the system does not tell."""
    with suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
    return 0


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
