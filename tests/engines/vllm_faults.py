"""A worker extension for tests: Lockstep's own, and ways to break things inside the server."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file

from lockstep.backends.vllm.extension import load as loading
from lockstep.backends.vllm.extension.worker import LockstepWorker
from tests.engines.held_faults import (
    AdapterFault,
    WeightFault,
    adapter_tensors_of,
    tensors_of,
)
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

    def faulty_weights(self, fault: WeightFault, old: str) -> dict[str, str]:
        """The next load makes the model hold other weights than were read; those after it do not.
        `old` is the file of the weights before."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        whole = type(model).load_weights

        def load_weights(weights: Iterator[Any]) -> Any:
            del model.load_weights
            if fault == "nothing loaded":
                return set()
            new = dict(weights)
            return whole(model, iter((new | tensors_of(fault, load_file(old), new)).items()))

        if fault == "stale tied head":
            repair = loading.REPAIRS["tied_head"]

            def skip(_: Any) -> None:
                loading.REPAIRS["tied_head"] = repair

            loading.REPAIRS["tied_head"] = skip
        else:
            model.load_weights = load_weights
        return {"fault": fault}

    def faulty_adapter(self, fault: AdapterFault, old: str) -> dict[str, str]:
        """The next adapter is loaded with this fault; `old` is the file of the one before."""
        workers: Any = self.model_runner.lora_manager  # type: ignore[attr-defined]
        manager = workers._adapter_manager
        load, add = workers._load_adapter, workers.add_adapter
        self._sound_add = add

        def load_other(request: Any) -> Any:
            del workers._load_adapter
            path = Path(mkdtemp())
            for file in Path(request.lora_path).iterdir():
                shutil.copy(file, path)
            file = path / "adapter_model.safetensors"
            save_file(adapter_tensors_of(fault, load_file(old), load_file(file)), file)
            return load(msgspec.structs.replace(request, lora_path=str(path)))

        def add_nothing(request: Any) -> bool:
            # Every batch adds its adapters again, but only a load does so in place.
            return True if request.load_inplace else bool(add(request))

        def activate_nothing(adapter: int) -> bool:
            if adapter not in manager._active_adapters:
                manager._active_adapters[adapter] = None
                manager.lora_index_to_id[manager.lora_index_to_id.index(None)] = adapter
            return True

        def activate_empty(adapter: int) -> Any:
            del manager.activate_adapter
            manager.get_adapter(adapter).loras.clear()
            return manager.activate_adapter(adapter)

        if fault == "dropped":
            manager.activate_adapter = activate_empty
        elif fault == "old adapter kept":
            workers.add_adapter = add_nothing
        elif fault == "stale slot":
            manager.activate_adapter = activate_nothing
        else:
            workers._load_adapter = load_other
        return {"fault": fault}

    def sound_adapters(self) -> dict[str, str]:
        """End the faults of adapters that last."""
        workers: Any = self.model_runner.lora_manager  # type: ignore[attr-defined]
        workers.add_adapter = self._sound_add
        workers.__dict__.pop("_load_adapter", None)
        workers._adapter_manager.__dict__.pop("activate_adapter", None)
        return {}
