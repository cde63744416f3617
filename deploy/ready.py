#!/usr/bin/env python3
"""Exit code 0 when a worker is proved and gets traffic, 1 otherwise: for probes and health checks.

`lockstep-ready WORKER` asks the gateway at LOCKSTEP_ADMIN_URL, with LOCKSTEP_ADMIN_TOKEN; WORKER is
the worker's id there. A worker that only runs is not ready: a rolling update that went on then
would stop the proved ones before the next are proved. Only the standard library: it runs often.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.parse
import urllib.request

SECONDS = 4.0


def main(worker: str) -> int:
    url = f"{os.environ['LOCKSTEP_ADMIN_URL']}/v1/rl/workers/{urllib.parse.quote(worker)}/ready"
    token = os.environ["LOCKSTEP_ADMIN_TOKEN"]
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return 0
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"{error.code}: {error.read().decode(errors='replace')}\n")
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
