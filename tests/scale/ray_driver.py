"""A two-node Ray cluster on this machine with a fleet on it, told what to do line by line.

`python ray_driver.py ADMIN_URL TOKEN PYTHON WEIGHTS_DIR`, with the python that has Ray; reads JSON
lines {"do": ...} and writes one for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from lockstep.integrations.ray import RayFleet
from lockstep.integrations.ray.object_checkpoint import ObjectCheckpoint
from lockstep.launch.parent_watch import exit_with_parent

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
HOSTS = ("127.0.0.2", "127.0.0.3")
"""Ray takes 127.0.0.1 for the address of the machine."""


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def perform(fleet: RayFleet, order: dict[str, Any]) -> dict[str, Any]:
    if order["do"] == "views":
        return {"views": await asyncio.to_thread(fleet.views)}
    if order["do"] == "serving":
        await fleet.wait_serving(60)
        return {}
    if order["do"] == "damaged":
        checkpoint = ObjectCheckpoint.put(Path(order["path"]))
        files = tuple(replace(file, sha256="0" * 64) for file in checkpoint.files)
        await asyncio.to_thread(replace(checkpoint, name="damaged", files=files).write, Path("."))
    operation = await fleet.update_weights(order["path"], order["version"])
    return {"workers": {one: result.status == "ok" for one, result in operation.workers.items()}}


def main(admin_url: str, token: str, python: str, weights_dir: str) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "include_dashboard": False, "node_ip_address": HOSTS[0]},
    )
    try:
        cluster.add_node(**NODE, node_ip_address=HOSTS[1])
        ray.init(address=cluster.address, _node_ip_address=HOSTS[0], logging_level="error")
        with RayFleet(
            "tiny",
            2,
            gateway=admin_url,
            token=token,
            python=python,
            api_key="key-of-the-workers",
            insecure=True,
            weights_dir=weights_dir,
        ) as fleet:
            say(views=fleet.views())
            for line in sys.stdin:
                try:
                    say(**asyncio.run(perform(fleet, json.loads(line))))
                except Exception as error:
                    say(error=f"{type(error).__name__}: {error}")
    finally:
        ray.shutdown()
        cluster.shutdown()
    say(stopped=True)


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    main(*sys.argv[1:])
