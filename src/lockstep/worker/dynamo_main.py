"""`python -m lockstep.worker.dynamo_main PARENT MODEL ...`: a Dynamo worker that ends with PARENT.

A deployment that is killed cannot stop its workers, so each asks the system to be killed with it.
Options are a small part of those of `lockstep worker`, which runs the same function.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.tokens.errors import LockstepError
from lockstep.wire.leash import hold


def main() -> None:
    hold(int(sys.argv.pop(1)))
    from lockstep.engine import EngineOptions
    from lockstep.worker.dynamo import run_dynamo_worker
    from lockstep.worker.serve import WorkerOptions

    parser = argparse.ArgumentParser(prog="lockstep.worker.dynamo_main")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--checkpoint-root", action="append", type=Path, default=[])
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument("--logprobs-mode", choices=["raw", "processed"], default="processed")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-loras", type=int, default=32)
    given = parser.parse_args()
    try:
        run_dynamo_worker(
            WorkerOptions(
                model=given.model,
                served_name=given.served_model_name,
                checkpoint_roots=tuple(given.checkpoint_root),
                drain_seconds=given.drain_seconds,
                engine=EngineOptions(
                    logprob_mode=given.logprobs_mode,
                    weight_version=given.weight_version,
                    max_model_len=given.max_model_len,
                    max_adapters=given.max_loras,
                ),
            )
        )
    except LockstepError as error:
        sys.stderr.write(f"error ({error.code}): {error.message}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
