"""A 50-turn, 32k-token conversation: the ledger and its bridge beside re-rendering every turn.

Both sides build the same prompts from the same messages with the same tokenizer, in the same run:
the peer renders the whole history anew with `renderers`, the ledger appends. Reported is CPU time.

    python benchmarks/conversation.py [--turns 50] [--tokens 32768] [--repeats 5]
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import renderers

from lockstep.render import Ledger, Renderer
from lockstep.tokens import Completion, VersionSpan

TARGET = 1 / 30
TEXT = (
    "the server answers with results and each has a score between zero and one so we sort them by "
    "number keep first ten write their names into table unless token limit was reached before that"
)
WORDS = TEXT.split()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--turns", type=int, default=50)
    options.add_argument("--tokens", type=int, default=32768)
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()

    model = find_model()
    renderer = Renderer.load(model)
    if renderer.family is None:
        raise SystemExit(f"{model} has no family in renderers to compare with")
    script = list(turns(renderer, args.turns, args.tokens))
    peer = renderers.create_renderer(renderer.tokenizer, renderers.Qwen3RendererConfig())

    print(f"tokenizer {model}, {args.turns} turns")
    ratios, ours, theirs = [], [], []
    for _ in range(args.repeats):
        spent, tokens = with_ledger(renderer, script)
        again, rendered = with_rendering(peer, script)
        ours.append(spent)
        theirs.append(again)
        ratios.append(spent / again)
    print(f"last prompt: {tokens} tokens appended, {rendered} tokens re-rendered")
    print(f"re-rendering   {1e3 * statistics.median(theirs) / args.turns:8.2f} ms per turn")
    print(f"ledger         {1e3 * statistics.median(ours) / args.turns:8.2f} ms per turn")
    ratio = statistics.median(ratios)
    print(f"median ratio   1/{1 / ratio:.0f}  (target 1/{1 / TARGET:.0f}: {ratio <= TARGET})")


def turns(
    renderer: Renderer, count: int, tokens: int
) -> Iterator[tuple[dict[str, Any], list[int], dict[str, Any]]]:
    """The new message of each turn, the ids sampled for it, and the answer as it is handed on."""
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
    for asked, ids, said in script:
        messages.append(asked)
        start = time.process_time()
        plan = ledger.plan(messages)
        spent += time.process_time() - start
        done = Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            prompt_ids=plan.prompt_ids,
            finish="stop",
            versions=(VersionSpan("1", 0, len(ids)),),
        )
        start = time.process_time()
        ledger.commit(plan, done, said)
        spent += time.process_time() - start
        messages.append(said)
        length = len(plan.prompt_ids)
    if ledger.break_counts:
        raise SystemExit(f"the ledger broke: {dict(ledger.break_counts)}")
    return spent, length


def with_rendering(peer: Any, script: list[Any]) -> tuple[float, int]:
    """CPU seconds for rendering the whole history on every turn, and the last prompt's length."""
    messages: list[dict[str, Any]] = []
    spent, length = 0.0, 0
    for asked, _, said in script:
        messages.append(asked)
        start = time.process_time()
        ids = peer.render_ids(messages, add_generation_prompt=True)
        spent += time.process_time() - start
        messages.append(said)
        length = len(ids)
    return spent, length


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
    main()
