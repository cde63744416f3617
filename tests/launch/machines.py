"""Machines with GPUs, as the programs that list and use them see them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

SMI = """#!{python}
import sys
print({listed!r} if "-L" in sys.argv else {table!r}, end="")
"""
RECORDER = """#!{python}
import http.server, json, os, sys
if "-c" in sys.argv:
    sys.exit(1)  # is this vLLM the build for CPUs?
with open({log!r}, "a") as file:
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    file.write(json.dumps([sys.argv[1:], {{name: os.environ.get(name) for name in names}}]) + "\\n")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Health)
print('{{"event": "ready"}}', flush=True)
server.serve_forever()
"""


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_nvidia_smi(
    directory: Path,
    gpus: int = 0,
    *,
    free: int = 80_000,
    total: int = 81_559,
    names: Sequence[str] | None = None,
    mig: Sequence[str] = (),
) -> Path:
    """Write an nvidia-smi that lists `gpus` GPUs, and one more that is cut into `mig` devices."""
    names = names or ["NVIDIA H100"] * gpus
    rows = [
        f"{at}, GPU-{at:08d}-aaaa, {names[at]}, {free}, {total}, Disabled" for at in range(gpus)
    ]
    lines = [f"GPU {at}: {names[at]} (UUID: GPU-{at:08d}-aaaa)" for at in range(gpus)]
    if mig:
        uuid = f"GPU-{gpus:08d}-aaaa"
        rows.append(f"{gpus}, {uuid}, NVIDIA A100, [N/A], [N/A], Enabled")
        lines.append(f"GPU {gpus}: NVIDIA A100 (UUID: {uuid})")
        lines += [f"  MIG 1g.5gb      Device  {at}: (UUID: {name})" for at, name in enumerate(mig)]
    table, listed = ("".join(f"{line}\n" for line in part) for part in (rows, lines))
    text = SMI.format(python=sys.executable, table=table, listed=listed)
    return _program(directory / "nvidia-smi", text)


def write_recorder(directory: Path) -> tuple[Path, Path]:
    """Write a Python interpreter that records its arguments and GPUs in a file, and then serves
    /health on its port. Return both paths."""
    log = directory / "starts.jsonl"
    python = directory / "python"
    return _program(python, RECORDER.format(python=sys.executable, log=str(log))), log
