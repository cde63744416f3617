"""Warm-up at start: kernels are compiled and graphs captured before the first request.

Triton caches compiled kernels on disk (TRITON_CACHE_DIR, by default ~/.triton/cache), so only the
first start of a model on a machine compiles them.
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
from lockstep.engine.numerics.plan import warn_of_fallback
from lockstep.engine.sequence import EngineRequest, Event, RequestHandle
from lockstep.tokens import Completion, LockstepError, Sampling
from lockstep.tokens.errors import EngineFailure

if TYPE_CHECKING:
    from lockstep.engine.core import Core

log = logging.getLogger(__name__)
PROGRESS_SECONDS = 2.0
WARM_UP_SAMPLING = (
    Sampling(max_tokens=3, ignore_eos=True),
    Sampling(max_tokens=3, ignore_eos=True, logprobs=5, prompt_logprobs=1),
    Sampling(max_tokens=3, ignore_eos=True, top_p=0.9, top_k=50, presence_penalty=0.1),
    Sampling(max_tokens=3, ignore_eos=True, temperature=0.0, logit_bias={0: 1.0}),
)
"""Sampling options whose first use loads code onto the device."""
WARM_UP_TOKENS = 40
FEWEST_PLACES = 2
"""Minimum number of adapters in a bank, because its self-test uses two."""


def overlapped_runner(core: Core) -> OverlappedRunner | None:
    """Return a runner that steps the engine by CUDA graphs, or None without fitting kernels."""
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
    """Prove exact arithmetic and warm up; return a description of what is covered.

    Kernels that do not compile, or do not fit this GPU, are replaced by slower ones: those of close
    arithmetic, then torch's own. Raises EngineFailure when exact arithmetic was requested, and when
    the machine lacks the tools that kernels are built with.
    """
    prove(core)
    while True:
        try:
            return warm(core, seconds)
        except TritonError as error:
            problem = _describe_error(error)
        except (RuntimeError, CalledProcessError) as error:
            _describe_error(error)
            raise
        if core.model.arithmetic.name == "exact":
            _fall_back_to_close(core, problem)
            continue
        log.warning("steps use torch's own kernels, without graphs: %s", problem)
        core.overlapped = core.model.prefiller = None
        return f"not warm, steps use torch's own kernels: {problem}"


def warm(core: Core, seconds: float) -> str:
    """Capture the graphs of all batch shapes, small ones first, and run a few requests.

    Returns a description of what is covered. Stops after `seconds`. A shape that is left is
    captured on first use, while its requests wait.
    """
    runner = core.overlapped
    if runner is None or seconds <= 0:
        return ""
    weights, start_time = core.served.weights, monotonic()
    shapes: list[tuple[int, str, Callable[[int], object]]] = []
    for name, sizes, capture in runner.shapes(weights):
        shapes += [(size, name, capture) for size in sizes]
    shapes.sort(key=lambda shape: shape[0])
    covered: dict[str, int] = {}
    last_log = start_time
    with torch.inference_mode():
        for captured, (size, name, capture) in enumerate(shapes):
            if monotonic() - start_time > seconds:
                break
            capture(size)
            covered[name] = size
            if monotonic() - last_log > PROGRESS_SECONDS:
                last_log = monotonic()
                log.info(
                    "warming up: %d of %d batch shapes, %.0f s",
                    captured,
                    len(shapes),
                    last_log - start_time,
                )
    _run_requests(core)
    # Captures leave freed blocks of many sizes in the allocator: return them to the device.
    gc.collect()
    torch.cuda.empty_cache()
    whole = all(covered.get(name, 0) >= size for size, name, _ in shapes)
    covered_text = ", ".join(f"{name} up to {size}" for name, size in sorted(covered.items()))
    note = f"warm after {monotonic() - start_time:.1f} s: {covered_text}"
    if whole:
        log.info("%s", note)
    else:
        note += f" (stopped after {seconds:g} s: larger batches are compiled on first use)"
        log.warning("%s", note)
    return note


def _run_requests(core: Core) -> None:
    """Run a request of each kind and leave no trace of it."""
    vocab = core.config.vocab_size
    length = max(min(WARM_UP_TOKENS, core.max_len - 4, vocab), 1)
    for sampling in WARM_UP_SAMPLING:
        complete(core, list(range(length)), sampling)


def complete(core: Core, ids: list[int], sampling: Sampling) -> Completion | None:
    """Run one request through an otherwise idle engine; return None, with a warning, if it fails.

    Caches and counters are reset afterwards.
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
            log.warning("an internal request failed: %s", event.message)
        elif isinstance(event, list):
            return event[0]
    return None


def prove(core: Core) -> None:
    """Keep exact arithmetic if the self-test proves it on this device, else fall back to close.

    Raises EngineFailure when exact was requested and does not hold.
    """
    from lockstep.engine.cuda.selftest import why_not_exact

    if core.model.arithmetic.name != "exact":
        return
    try:
        problem = why_not_exact(core) if core.overlapped else "there are no kernels for this model"
    except (RuntimeError, TritonError, CalledProcessError) as error:
        problem = _describe_error(error)
    if problem is None:
        _prove_adapters(core)
    else:
        _fall_back_to_close(core, f"the self-test failed: {problem}")


def _describe_error(error: Exception) -> str:
    """Return why kernels do not run here. Raises EngineFailure for a missing compiler."""
    if isinstance(error, CalledProcessError) or "C compiler" in str(error):
        raise EngineFailure(
            f"Triton could not build its kernel launchers, for which it needs a C compiler and "
            f"Python's headers: {error}; install gcc and python3-dev, or set CC to a compiler"
        ) from error
    return f"the kernels do not run here: {error}"


def _fall_back_to_close(core: Core, problem: str) -> None:
    """Switch to close arithmetic. Raises EngineFailure when exact was requested."""
    if core.options.arithmetic == "exact":
        raise EngineFailure(f"exact arithmetic does not hold on this GPU: {problem}")
    warn_of_fallback(problem)
    core.model.arithmetic = Close()
    core.arithmetic_note = problem
    core.plan = replace(core.plan, arithmetic="close", reason=core.arithmetic_note, fingerprint="")
    core.model.prefiller = None
    core.overlapped = overlapped_runner(core)


def _prove_adapters(core: Core) -> None:
    """Check that adapters in graphs give the same bits as adapters applied one by one.

    If they do not, the bank is dropped and adapters are launched one by one.
    """
    from lockstep.engine.cuda.selftest import why_not_adapted

    if core.overlapped is None or (bank := core.overlapped.bank) is None:
        return
    try:
        problem = why_not_adapted(core.config, bank, core.cache.k)
    except (RuntimeError, TritonError, CalledProcessError) as error:
        problem = _describe_error(error)
    if problem is not None:
        log.warning("requests with adapters are computed without graphs: %s", problem)
        core.overlapped.drop_bank()
