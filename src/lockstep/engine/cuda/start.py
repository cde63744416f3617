"""Warm at start: kernels are compiled and graphs captured before the first request comes.

Triton keeps compiled kernels on disk (TRITON_CACHE_DIR, by default ~/.triton/cache), so that only
the first start of a model on a machine compiles them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from subprocess import CalledProcessError
from time import monotonic
from typing import TYPE_CHECKING

import torch
from triton.errors import TritonError

from lockstep.engine.cuda.graphs import Decoder, GraphPool, supported
from lockstep.engine.cuda.kernels.adapters import AdapterBank
from lockstep.engine.cuda.kernels.exact_kernels import PART
from lockstep.engine.cuda.overlapped import OverlappedRunner
from lockstep.engine.cuda.prefill import Prefiller
from lockstep.engine.cuda.table import bucket
from lockstep.engine.model.arithmetic import Close
from lockstep.engine.sequence import EngineRequest, Event, RequestHandle
from lockstep.tokens import Completion, LockstepError, Sampling
from lockstep.tokens.errors import EngineFailure

if TYPE_CHECKING:
    from lockstep.engine.core import Core

log = logging.getLogger(__name__)
PROGRESS_SECONDS = 2.0
REHEARSED = (
    Sampling(max_tokens=3, ignore_eos=True),
    Sampling(max_tokens=3, ignore_eos=True, logprobs=5, prompt_logprobs=1),
    Sampling(max_tokens=3, ignore_eos=True, top_p=0.9, top_k=50, presence_penalty=0.1),
    Sampling(max_tokens=3, ignore_eos=True, temperature=0.0, logit_bias={0: 1.0}),
)
"""Options whose first use loads code onto the device."""
REHEARSED_TOKENS = 40
FEWEST_PLACES = 2
"""Adapters that a bank has room for, even if only one sequence runs: its self-test has two."""


def overlapped_runner(core: Core) -> OverlappedRunner | None:
    """What runs the steps of an engine by graphs; None where the kernels do not fit it."""
    if not supported(core.model, core.cache):
        return None
    pool, bank = GraphPool(), None
    max_rank = core.options.max_lora_rank if core.options.max_adapters else 0
    if core.model.arithmetic.name == "exact" and 0 < max_rank <= PART:
        places = max(bucket(core.cache.slots), FEWEST_PLACES)
        bank = AdapterBank(core.config, places, max_rank, core.cache.k)
    decoder = Decoder(core.model, core.cache, pool, bank)
    prefiller = Prefiller(core.model, core.cache, pool, core.scheduler.max_batch_tokens, bank)
    core.model.prefiller = prefiller
    return OverlappedRunner(decoder, prefiller, core.scheduler, core.runner, core.take, core.wipe)


def start(core: Core, seconds: float) -> str:
    """Proves what is exact, and warms up; returns what is covered, in words.

    Kernels that this GPU has no room for, or no compiler, are left for slower ones: those of close
    arithmetic, then torch's own. Raises EngineFailure where exact was demanded, and where the
    machine lacks what kernels are built with.
    """
    prove(core)
    while True:
        try:
            return warm(core, seconds)
        except TritonError as error:
            problem = _problem(error)
        except (RuntimeError, CalledProcessError) as error:
            _problem(error)
            raise
        if core.model.arithmetic.name == "exact":
            _take_close(core, problem)
            continue
        log.warning("steps run by torch's own kernels, launch by launch: %s", problem)
        core.overlapped = core.model.prefiller = None
        return f"not warm, steps run by torch's own kernels: {problem}"


def warm(core: Core, seconds: float) -> str:
    """Captures the graphs of all batch shapes, small ones first, and rehearses a few requests.

    Returns what is covered, in words. Stops when `seconds` have passed; a shape that is left is
    captured when it first comes, while its requests wait.
    """
    runner = core.overlapped
    if runner is None or seconds <= 0:
        return ""
    weights, begun = core.served.weights, monotonic()
    shapes: list[tuple[int, str, Callable[[int], object]]] = []
    for name, sizes, capture in runner.shapes(weights):
        shapes += [(size, name, capture) for size in sizes]
    shapes.sort(key=lambda shape: shape[0])
    covered: dict[str, int] = {}
    told = begun
    with torch.inference_mode():
        for done, (size, name, capture) in enumerate(shapes):
            if monotonic() - begun > seconds:
                break
            capture(size)
            covered[name] = size
            if monotonic() - told > PROGRESS_SECONDS:
                told = monotonic()
                log.info(
                    "warming up: %d of %d batch shapes, %.0f s", done, len(shapes), told - begun
                )
    _rehearse(core)
    gc.collect()
    torch.cuda.empty_cache()
    whole = all(covered.get(name, 0) >= size for size, name, _ in shapes)
    shown = ", ".join(f"{name} up to {size}" for name, size in sorted(covered.items()))
    note = f"warm after {monotonic() - begun:.1f} s: {shown}"
    if whole:
        log.info("%s", note)
    else:
        note += f" ({seconds:g} s were allowed: larger batches are compiled when they first come)"
        log.warning("%s", note)
    return note


def _rehearse(core: Core) -> None:
    """Runs a request of each kind, and leaves no trace of them."""
    vocab = core.config.vocab_size
    length = max(min(REHEARSED_TOKENS, core.max_len - 4, vocab), 1)
    for sampling in REHEARSED:
        complete(core, list(range(length)), sampling)


def complete(core: Core, ids: list[int], sampling: Sampling) -> Completion | None:
    """One request through an engine that has no others; None, with a warning, where it failed.

    Leaves no trace of it in caches and counters.
    """
    before = core.steps, core.prompt_tokens, core.generated_tokens
    events: list[Event] = []
    request = EngineRequest(prompt_ids=ids, sampling=sampling)
    core.submit(RequestHandle(request, events.append))
    while core.has_work:
        core.step()
    core.steps, core.prompt_tokens, core.generated_tokens = before
    core.prefixes.clear()
    core.prefixes.hits = core.prefixes.queries = 0
    for event in events:
        if isinstance(event, LockstepError):
            log.warning("a request of the engine itself failed: %s", event.message)
        elif isinstance(event, list):
            return event[0]
    return None


def prove(core: Core) -> None:
    """Keeps exact arithmetic where a self-test proves it on this device, else falls back to close.

    Raises EngineFailure where exact was demanded and does not hold.
    """
    from lockstep.engine.cuda.selftest import why_not_exact

    if core.model.arithmetic.name != "exact":
        return
    try:
        problem = why_not_exact(core) if core.overlapped else "there are no kernels for this model"
    except (RuntimeError, TritonError, CalledProcessError) as error:
        problem = _problem(error)
    if problem is None:
        _prove_adapters(core)
    else:
        _take_close(core, f"the self-test failed: {problem}")


def _problem(error: Exception) -> str:
    """Why kernels do not run here. Raises EngineFailure where the machine can be mended."""
    if isinstance(error, CalledProcessError) or "C compiler" in str(error):
        raise EngineFailure(
            f"Triton builds what launches its kernels with a C compiler and Python's headers, and "
            f"could not: {error}; install gcc and python3-dev, or name a compiler in CC"
        ) from error
    return f"the kernels do not run here: {error}"


def _take_close(core: Core, problem: str) -> None:
    """Goes on in close arithmetic. Raises EngineFailure where exact was demanded."""
    if core.options.arithmetic == "exact":
        raise EngineFailure(f"exact arithmetic does not hold on this GPU: {problem}")
    log.warning("falling back to close arithmetic: %s", problem)
    core.model.arithmetic = Close()
    core.arithmetic_note = problem
    core.plan = replace(core.plan, arithmetic="close", reason=core.arithmetic_note, fingerprint="")
    core.model.prefiller = None
    core.overlapped = overlapped_runner(core)


def _prove_adapters(core: Core) -> None:
    """Leaves adapters to kernels that were proved with them, launch by launch, where those that a
    graph can hold do not give the same bits."""
    from lockstep.engine.cuda.selftest import why_not_adapted

    if core.overlapped is None or (bank := core.overlapped.bank) is None:
        return
    try:
        problem = why_not_adapted(core.config, bank, core.cache.k)
    except (RuntimeError, TritonError, CalledProcessError) as error:
        problem = _problem(error)
    if problem is not None:
        log.warning("requests under adapters are computed without graphs: %s", problem)
        core.overlapped.drop_bank()
