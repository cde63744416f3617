"""Grammar processes seen from the engine: start, compile, advance, and say why one has ended."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import monotonic
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor

from lockstep.engine.text import grammar_server as wire
from lockstep.tokens.errors import BadRequest, Busy, EngineFailure, GrammarLimit

LIMITS = wire.Limits(
    compile_seconds=10.0,
    step_seconds=2.0,
    refill_seconds=0.01,
    memory_bytes=512 << 20,
    total_bytes=2 << 30,
    stack_bytes=64 << 20,
)
"""Limits of grammar processes. A usual step takes 0.1 ms, a usual compilation 10 ms, and a usual
process 5 MiB."""
PATIENCE_SECONDS = 120.0
"""Longest wait for a process that uses no CPU, for example because the machine is overloaded."""
MOST_PENDING = 64
"""Steps sent ahead of their results. More could fill both directions of the socket."""
FIELD = "structured_outputs"


class GrammarServer:
    """The server that forks grammar processes. It starts on first use and is started again if it
    dies.
    """

    def __init__(self, setup: Callable[[], wire.Setup], limits: wire.Limits = LIMITS) -> None:
        self.limits = limits
        self._setup = setup
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def compile(self, source: wire.GrammarSource) -> GrammarProcess:
        """Return a process that holds the compiled grammar.

        Raises BadRequest for an invalid grammar, GrammarLimit for one that exceeds a limit, and
        Busy when all grammars together need too much memory.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._command(b"f", 0, theirs)
            except BaseException:
                ours.close()
                raise
        process = GrammarProcess(self, ours, pid)
        try:
            process.compile(source)
        except BaseException:
            process.close()
            raise
        return process

    def status(self, pid: int) -> int:
        """Return the wait status of a process. Ends it if it still runs."""
        return self._command(b"s", pid)

    def why_ended(self, status: int) -> str:
        """Return the limit that a process with this wait status has exceeded."""
        limits = self.limits
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if ended_by == wire.CROWDED:
            return (
                "all grammars of this worker together need more memory than "
                f"{limits.total_bytes >> 20} MiB, and this one needs the most: send it again later"
            )
        if ended_by == signal.SIGPROF:
            return (
                f"it used more CPU time than a grammar may: {limits.compile_seconds:g} s to "
                f"compile, {limits.step_seconds:g} s to advance"
            )
        if ended_by in (signal.SIGSEGV, signal.SIGBUS):
            return f"its rules are nested too deeply for a stack of {limits.stack_bytes >> 20} MiB"
        if ended_by == signal.SIGABRT or (ended_by is None and os.WEXITSTATUS(status) == 2):
            return f"it needs more memory than a grammar may: {limits.memory_bytes >> 20} MiB"
        cause = f"signal {ended_by}" if ended_by else f"exit status {os.WEXITSTATUS(status)}"
        return f"its process ended with {cause}"

    def close(self) -> None:
        """End the server. Grammar processes end when their own sockets are closed."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        self._stop()

    def _command(self, name: bytes, pid: int, conn: socket.socket | None = None) -> int:
        with self._lock:
            control = self._start()
            try:
                message = wire.COMMAND.pack(name, pid)
                if conn is None:
                    control.sendall(message)
                else:
                    socket.send_fds(control, [message], [conn.fileno()])
                (result,) = wire.REPLY.unpack(wire.read(control, wire.REPLY.size))
            except (OSError, EOFError):
                self._stop()
                raise EngineFailure("the grammar server ended: it is started again") from None
            return int(result)

    def _start(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        with theirs:
            # No threads in the server: only the thread that forks exists in its children.
            threads = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            self._server = subprocess.Popen(
                [sys.executable, "-P", wire.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | threads,
            )
        ours.settimeout(PATIENCE_SECONDS)
        try:
            wire.write_message(ours, msgspec.msgpack.encode(self._setup()))
            wire.read(ours, wire.REPLY.size)
        except (OSError, EOFError):
            ours.close()
            self._stop()
            raise EngineFailure("the grammar server did not start: see the worker's log") from None
        self._control = ours
        return ours

    def _stop(self) -> None:
        control, self._control = self._control, None
        server, self._server = self._server, None
        if control is not None:
            control.close()
        if server is not None:
            server.kill()
            server.wait()


class GrammarProcess:
    """The process of one grammar, which advances all matchers of it.

    It ends when this object is deleted: its socket is then closed.
    """

    def __init__(self, server: GrammarServer, conn: socket.socket, pid: int) -> None:
        self._server = server
        self._conn = conn
        self._pid = pid
        conn.settimeout(PATIENCE_SECONDS)
        self._lock = threading.RLock()
        self._numbers = count()
        self._matchers: WeakValueDictionary[int, GrammarMatcher] = WeakValueDictionary()
        self._pending = 0
        self._deleted: deque[int] = deque()
        self.error = ""
        self.crowded = False
        """Whether it was ended because all processes together needed too much memory."""

    def compile(self, source: wire.GrammarSource) -> None:
        """Compile the grammar. Raises BadRequest, GrammarLimit or Busy."""
        try:
            wire.write_message(self._conn, msgspec.msgpack.encode(source))
            error = wire.read_message(self._conn).decode()
        except (OSError, EOFError):
            self.end()
            kind = Busy if self.crowded else GrammarLimit
            raise kind(
                f"the grammar of {FIELD}, response_format or a tool was rejected: {self.error}",
                param=FIELD,
            ) from None
        if error:
            raise BadRequest(
                f"the grammar of {FIELD}, response_format or a tool ({source.kind}) cannot be "
                f"held to: {error.splitlines()[0][:1000]}",
                param=FIELD,
            )

    def matcher(self, vocab_size: int, eos_id: int) -> GrammarMatcher:
        """Return a new matcher at the start of the grammar."""
        with self._lock:
            number = next(self._numbers)
            matcher = GrammarMatcher(self, number, vocab_size, eos_id)
            self._matchers[number] = matcher
            self.send(b"n", number)
            return matcher

    def send(self, name: bytes, number: int, token: int = 0) -> None:
        """Send a step without waiting for its result."""
        with self._lock:
            if self._pending >= MOST_PENDING:
                self.receive()
            steps = [wire.STEP.pack(name, number, token)]
            while self._deleted:
                steps.append(wire.STEP.pack(b"d", self._deleted.popleft(), 0))
            try:
                self._conn.sendall(b"".join(steps))
            except OSError:
                self.end()
            else:
                self._pending += 1

    def receive(self) -> None:
        """Read the result of one step and hand it to its matcher."""
        with self._lock:
            try:
                head = wire.read(self._conn, wire.STATE.size)
                number, flags, length = wire.STATE.unpack(head)
                payload = wire.read(self._conn, length)
            except (OSError, EOFError):
                self.end()
                return
            self._pending -= 1
            if (matcher := self._matchers.get(number)) is not None:
                matcher.update(flags, payload)

    def readable(self) -> bool:
        """Return whether `receive` would not wait."""
        return bool(self.error) or bool(_poll([self], 0.0))

    def fileno(self) -> int:
        return self._conn.fileno()

    def delete(self, number: int) -> None:
        """Delete a matcher with the next step. May be called from any thread."""
        self._deleted.append(number)

    def close(self) -> None:
        self._conn.close()

    def __del__(self) -> None:
        self._conn.close()

    def end(self) -> None:
        """End the process if it still runs, and find out why it has ended."""
        if not self.error:
            status = self._server.status(self._pid)
            self.crowded = os.WIFSIGNALED(status) and os.WTERMSIG(status) == wire.CROWDED
            self.error = self._server.why_ended(status)
        self._conn.close()


class GrammarMatcher:
    """The state of one sequence within its grammar.

    `consume` does not wait. The process computes the mask of the next token meanwhile.
    """

    def __init__(self, process: GrammarProcess, number: int, vocab_size: int, eos_id: int) -> None:
        self._process = process
        self._number = number
        self._vocab_size = vocab_size
        self._eos_id = eos_id
        self._steps, self._since = 1, monotonic()
        self._flags = 0
        self._payload = b""
        self.late = False
        """Whether a step of the engine has waited for this mask in vain."""

    def mask(self, end_ids: Sequence[int]) -> Tensor:
        """Return the allowed next tokens, (vocab,) bool.

        End tokens are allowed only where the grammar may end. After a failure nothing is allowed,
        and `error` holds the reason.
        """
        # Use numpy: a torch operation may wait for its thread pool, hundreds of times as long.
        bits = np.zeros(self._vocab_size, dtype=np.uint8)
        if self.error:
            return torch.from_numpy(bits.view(np.bool_))
        if not self._flags & wire.STOPPED:
            words = np.frombuffer(self._payload, dtype=np.uint8)
            bits = np.unpackbits(words, count=self._vocab_size, bitorder="little")
            bits[self._eos_id] = 0
        bits[list(end_ids)] = bool(self._flags & wire.ACCEPTING)
        return torch.from_numpy(bits.view(np.bool_))

    def consume(self, token: int) -> None:
        """Advance past a token that is not an end token. Sets `error` if it is not allowed here."""
        self._steps += 1
        self._since, self.late = monotonic(), False
        self._process.send(b"t", self._number, token)

    @property
    def ready(self) -> bool:
        """Whether the mask can be read without waiting."""
        while self._steps and self._process.readable():
            if self._process.error:
                return True
            self._process.receive()
        if self._steps and monotonic() - self._since > PATIENCE_SECONDS:
            self._process.end()
            return True
        return self._steps == 0

    @property
    def process(self) -> GrammarProcess:
        """The process that advances this matcher."""
        return self._process

    @property
    def error(self) -> str:
        """Why the grammar cannot be followed any further, or an empty string."""
        while self._steps and not self._process.error:
            self._process.receive()
        if self._process.error:
            return self._process.error
        return self._payload.decode() if self._flags & wire.FAILED else ""

    @property
    def complete(self) -> bool:
        """Whether no further token is allowed."""
        return not self.error and bool(self._flags & wire.STOPPED)

    def update(self, flags: int, payload: bytes) -> None:
        """Take the result of the oldest step that has none yet."""
        self._steps -= 1
        self._flags, self._payload = flags, payload

    def __del__(self) -> None:
        self._process.delete(self._number)


def wait_for_masks(matchers: Iterable[GrammarMatcher], seconds: float) -> None:
    """Wait until the masks of all matchers are ready, at most `seconds`."""
    deadline = monotonic() + seconds
    waiting = [matcher for matcher in matchers if not matcher.ready]
    while waiting and (rest := deadline - monotonic()) > 0:
        _poll({matcher.process for matcher in waiting}, rest)
        waiting = [matcher for matcher in waiting if not matcher.ready]


def _poll(processes: Iterable[GrammarProcess], seconds: float) -> list[tuple[int, int]]:
    # Not select.select, which fails for descriptors over 1,023.
    poll = select.poll()
    for process in processes:
        poll.register(process.fileno(), select.POLLIN)
    return poll.poll(seconds * 1000)
