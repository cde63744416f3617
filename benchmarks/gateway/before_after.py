"""What a request costs in a gateway of this source tree, beside the same gateway of another one.

    python -m benchmarks.gateway.before_after OTHER_TREE [--case 2k,chat] [--rounds 9]

OTHER_TREE is a clone of this repository at an earlier commit; both run in this environment, before
the same upstream and with the same load, in turns. A figure is the least of the rounds: on a
machine that others use too, that is what the code itself costs. The ratio is the median of the
ratios of neighbouring rounds.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.gateway.bench import Failed, bench
from benchmarks.gateway.contestants import CONTESTANTS, Contestant, Place, Server, lockstep
from benchmarks.gateway.traffic import ALL_CASES
from benchmarks.peers import ROOT

ROUNDS = 9
UPSTREAMS = {"vllm": "a plain vLLM server", "lockstep": "a Lockstep worker"}


def of_tree(place: Place, owner: str, *, tree: Path) -> Server:
    return lockstep(place, owner, PYTHONPATH=str(tree / "src"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="a clone at an earlier commit")
    parser.add_argument("--case", default=",".join(ALL_CASES), help=f"of {', '.join(ALL_CASES)}")
    parser.add_argument("--upstream", choices=UPSTREAMS, default="vllm", help="what stands behind")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    cases = options.case.split(",")
    trees = {"before": options.other.resolve(), "after": ROOT}
    for name, tree in trees.items():
        CONTESTANTS[name] = Contestant(partial(of_tree, tree=tree), options.upstream)
    print(f"ms CPU of a request, before {UPSTREAMS[options.upstream]}")
    print("| what | before | after | ratio |\n| --- | --- | --- | --- |", flush=True)
    with bench(tuple(trees), cases) as started:
        for case in cases:
            seen: dict[str, list[float]] = {name: [] for name in trees}
            try:
                for turn in range(options.rounds + 1):
                    for name, costs in seen.items():
                        result = started.round(name, case)
                        if turn:  # the first one warms up
                            costs.append(1e3 * result.cpu_seconds / result.requests)
            except Failed as error:
                print(f"| {case} | {str(error)[:2000]} |", flush=True)
                continue
            ratios = [
                after / before for before, after in zip(seen["before"], seen["after"], strict=True)
            ]
            before, after = min(seen["before"]), min(seen["after"])
            print(f"| {case} | {before:.3f} | {after:.3f} | {median(ratios):.2f} x |", flush=True)


if __name__ == "__main__":
    main()
