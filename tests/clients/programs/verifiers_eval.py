"""verifiers: its own command line on an environment with a tool server, as eval or train client."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

here = Path(__file__).parent
base, kind, model, tokenizer, rollouts = sys.argv[1:6]
options = ["--client.type", kind]
if kind == "train":
    options += [
        "--client.renderer.name", "qwen3",
        "--client.renderer.thinking-retention", "all",
        "--client.renderer-model-name", tokenizer,
    ]  # fmt: skip
with tempfile.TemporaryDirectory() as outputs:
    result = subprocess.run(
        [
            str(Path(sys.executable).with_name("vf-eval")), "calc-v1", "-m", model,
            "--client.base-url", base, "--client.api-key-var", "OPENAI_API_KEY", *options,
            "--sampling.temperature", "1.0", "--sampling.max-tokens", "200",
            "--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess",
            "-n", "1", "-r", rollouts, "--no-rich", "--no-push", "-o", outputs, *sys.argv[6:],
        ],
        env={
            **os.environ,
            "PATH": f"{here / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(here),
            "LOCKSTEP_TEST_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
    print(result.stdout[-1500:], result.stderr[-3000:], file=sys.stderr)
    (written,) = Path(outputs).glob("*/traces.jsonl")
    episodes = [json.loads(line) for line in written.read_text().splitlines()]
print(json.dumps([trace for episode in episodes for trace in episode.get("traces", [episode])]))
