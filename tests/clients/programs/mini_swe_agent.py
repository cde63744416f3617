"""mini-swe-agent: its own command line, with nothing but the base URL changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

Path("notes.txt").write_text("1509\n")
command = [
    str(Path(sys.executable).with_name("mini")), "-y", "--exit-immediately",
    "-m", "openai/tiny", "-t", "MINI TASK: read the notes.", "-o", "trajectory.json",
    "-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={sys.argv[1]}",
]  # fmt: skip
environ = {
    **os.environ,
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
}
result = subprocess.run(
    command, env=environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
)
print(result.stdout[-2000:], result.stderr[-3000:], file=sys.stderr)
info = json.loads(Path("trajectory.json").read_text())["info"]
print(json.dumps({"status": info["exit_status"], "answer": info["submission"].strip()}))
