"""A 50-turn, 32k-token conversation: the ledger beside what `renderers` offers, in CPU time.

All build the same prompts from the same messages with the same tokenizer, in the same run. The
peer renders the whole history anew on every turn, or bridges: then its caller keeps every id
itself, and nothing is matched, checked or stored.

    python -m benchmarks.conversation
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import renderers

from benchmarks import table
from benchmarks.measure import in_turns
from benchmarks.table import Row
from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.tokens import Completion, VersionSpan

TURNS, TOKENS = 50, 32_768
ROUNDS = 5
TEXT = (
    "the server answers with results and each has a score between zero and one so we sort them by "
    "number keep first ten write their names into table unless token limit was reached before that"
)
WORDS = TEXT.split()


def rows() -> list[Row]:
    model = find_model()
    renderer = Renderer.load(model)
    if renderer.family is None:
        raise SystemExit(f"{model} has no family in renderers to compare with")
    script = list(turns(renderer, TURNS, TOKENS))
    peer, bridging = (
        renderers.create_renderer(
            renderer.tokenizer, renderers.Qwen3RendererConfig(thinking_retention=kept)
        )
        for kept in (None, "all")  # it bridges to a new question only where thinking stays
    )
    lengths: dict[str, int] = {}

    def timed(name: str, call: Callable[[Any, list[Any]], tuple[float, int]], by: Any) -> float:
        spent, lengths[name] = call(by, script)
        return spent / len(script) * 1e3

    medians = in_turns(
        {
            "ledger": lambda: timed("ledger", with_ledger, renderer),
            "again": lambda: timed("again", with_rendering, peer),
            "bridge": lambda: timed("bridge", with_bridge, bridging),
        },
        ROUNDS,
    )
    if lengths["ledger"] != lengths["bridge"]:
        raise SystemExit(f"the last prompts differ: {lengths}")
    return [
        Row(
            what=f"a turn of a {TURNS}-turn conversation, {lengths[name]:,} tokens at its end",
            against=f"renderers {version('renderers')}, {how}",
            ours=medians["ledger"],
            theirs=medians[name],
            unit="ms CPU",
            note=note,
        )
        for name, how, note in (
            ("again", "rendered again", "plan and commit of the ledger"),
            ("bridge", "bridge_to_next_turn", "its caller keeps and matches the history"),
        )
    ]


def turns(
    renderer: Renderer, count: int, tokens: int
) -> Iterator[tuple[dict[str, Any], list[int], dict[str, Any]]]:
    """The new message of each turn, the ids sampled for it, and the reply as a message."""
    rng = random.Random(0)
    share = tokens // count // 3
    for turn in range(count):
        ids = [*renderer.encode(prose(rng, renderer, 2 * share)), renderer.stop_token_ids[0]]
        message = renderer.parse(ids).message()
        yield {"role": "user", "content": f"{turn}: {prose(rng, renderer, share)}"}, ids, message


def prose(rng: random.Random, renderer: Renderer, tokens: int) -> str:
    """About so many tokens of what tools and users write: words, names, numbers."""
    made: list[str] = []
    while len(made) < tokens:
        made += rng.choices(WORDS, k=8)
        made += [f"{rng.choice(WORDS)}_{rng.choice(WORDS)}", f"{rng.random():.3f},"]
        if len(made) % 5 == 0 and len(renderer.encode(" ".join(made))) >= tokens:
            break
    return " ".join(made)


def with_ledger(renderer: Renderer, script: list[Any]) -> tuple[float, int]:
    """CPU seconds for every plan and commit, and the length of the last prompt."""
    ledger = Ledger(renderer)
    messages: list[dict[str, Any]] = []
    spent, length = 0.0, 0
    for question, ids, reply in script:
        messages.append(question)
        start = time.process_time()
        plan = ledger.plan(messages)
        spent += time.process_time() - start
        completion = Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            prompt_ids=plan.prompt_ids,
            finish="stop",
            versions=(VersionSpan("1", 0, len(ids)),),
        )
        start = time.process_time()
        ledger.commit(plan, completion, reply)
        spent += time.process_time() - start
        messages.append(reply)
        length = len(plan.prompt_ids)
    if ledger.break_counts:
        raise SystemExit(f"the ledger broke: {dict(ledger.break_counts)}")
    return spent, length


def with_rendering(peer: Any, script: list[Any]) -> tuple[float, int]:
    """CPU seconds for rendering the whole history on every turn, and the last prompt's length."""
    messages: list[dict[str, Any]] = []
    spent, length = 0.0, 0
    for question, _, reply in script:
        messages.append(question)
        start = time.process_time()
        ids = peer.render_ids(messages, add_generation_prompt=True)
        spent += time.process_time() - start
        messages.append(reply)
        length = len(ids)
    return spent, length


def with_bridge(peer: Any, script: list[Any]) -> tuple[float, int]:
    """CPU seconds for bridging every turn to the next, and the last prompt's length."""
    prompt: list[int] = []
    before: list[int] = []
    spent = 0.0
    for question, ids, _ in script:
        start = time.process_time()
        if not prompt:
            prompt = peer.render_ids([question], add_generation_prompt=True)
        else:
            bridged = peer.bridge_to_next_turn(prompt, before, [question])
            if bridged is None:
                raise SystemExit("renderers found no bridge to the next turn")
            prompt = bridged.token_ids
        spent += time.process_time() - start
        before = ids
    return spent, len(prompt)


def find_model() -> Path | str:
    """The real Qwen3 tokenizer where it can be had, otherwise the bundled one."""
    source = load_by_path(Path(__file__).parents[1] / "tests" / "tokenizers.py")
    try:
        place: Path = source.directory("qwen3")
    except source.Unobtainable as why:
        print(f"{why}; using the bundled tokenizer")
        return "tiny"
    return place


def load_by_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_tokenizers", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    table.main(rows, __doc__)
