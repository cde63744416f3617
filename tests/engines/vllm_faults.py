"""A worker extension for tests: Lockstep's own, and ways to break things inside the server."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from safetensors.torch import load_file

from lockstep.backends.vllm.extension.worker import LockstepWorker
from tests.fleet.weight_faults import Fault, replaced


class FaultyWorker(LockstepWorker):
    def faulty_environ(self, name: str, value: str) -> dict[str, str]:
        """Sets a variable of the worker process, which its own code reads when it needs it."""
        os.environ[name] = value
        return {name: value}

    def slow_steps(self, seconds: float) -> dict[str, float]:
        """Delay every later step of the model by so many seconds."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        execute = type(runner).execute_model

        def execute_late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return execute(runner, *args, **kwargs)

        runner.execute_model = execute_late
        return {"seconds": seconds}

    def faulty_load(self, after: int, times: int = 1) -> dict[str, int]:
        """The next loads break off after so many tensors."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        whole = type(model).load_weights
        left = [times]

        def load_weights(weights: Iterator[Any]) -> Any:
            if not left[0]:
                return whole(model, weights)
            left[0] -= 1
            return whole(model, broken(weights))

        def broken(weights: Iterator[Any]) -> Iterator[Any]:
            for at, item in enumerate(weights):
                if at == after:
                    raise OSError("the disk is gone")
                yield item

        model.load_weights = load_weights
        return {"after": after}

    def faulty_tensors(self, fault: Fault, old: str) -> dict[str, str]:
        """The next load puts other tensors into the model than were read: those of `fault`, from
        the checkpoint file `old`."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        whole = type(model).load_weights
        left = [1]

        def load_weights(weights: Iterator[Any]) -> Any:
            if not left[0]:
                return whole(model, weights)
            left[0] -= 1
            new = dict(weights)
            return whole(model, iter((new | replaced(fault, load_file(old), new)).items()))

        model.load_weights = load_weights
        return {"fault": fault}
