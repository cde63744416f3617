"""Keeps a fleet of workers on a Ray cluster, joined to a gateway.

    lockstep gateway --workers-join --tokenizer tiny
    python examples/ray/fleet.py --gateway http://127.0.0.1:8001

Without --address a Ray of this machine is started, with workers on loopback. LOCKSTEP_ADMIN_TOKEN
is the gateway's. Workers off loopback need --api-key, LOCKSTEP_WORKER_API_KEY of the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import os

import ray

from lockstep.integrations.ray import RayFleet


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gateway", default="http://127.0.0.1:8001", help="its admin URL")
    parser.add_argument("--address", help="of a Ray cluster, such as ray-head:6379")
    parser.add_argument("--api-key")
    parser.add_argument("--insecure", action="store_true", help="admin ports without TLS")
    parser.add_argument("--python", help="interpreter with the engine, on every node")
    parser.add_argument("--weights-dir", help="where checkpoints go on each node")
    parser.add_argument("--update", help="directory of a checkpoint to serve")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    if options.address is None:
        ray.init(
            num_cpus=options.workers, include_dashboard=False, object_store_memory=200 << 20,
            logging_level="error",
        )  # fmt: skip
    else:
        ray.init(address=options.address)
    with RayFleet(
        options.model,
        options.workers,
        gateway=options.gateway,
        token=os.environ["LOCKSTEP_ADMIN_TOKEN"],
        python=options.python,
        api_key=options.api_key,
        insecure=options.insecure,
        host="127.0.0.1" if options.address is None else None,
        weights_dir=options.weights_dir,
    ) as fleet:
        await fleet.wait_serving()
        for row in fleet.views():
            print(f"{row['id']} serves at {row['url']}, on node {row['node'][:8]}")
        if options.update is not None:
            operation = await fleet.update_weights(options.update)
            print(f"version {operation.version} is proved on {len(operation.workers)} workers")
        await asyncio.sleep(options.seconds)


if __name__ == "__main__":
    asyncio.run(main())
