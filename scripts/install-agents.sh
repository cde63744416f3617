#!/usr/bin/env bash
# Installs the agents that tests run end to end into a directory of their own (default
# .venv-agents): Python ones in a virtual environment, Node ones in its node_modules, with the Node
# that some of them need. Does nothing when that was done already.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-agents}"
python="${PYTHON:-python3}"
wanted="scripts/agents-requirements.txt"
ready="$venv/.ready"
node=(
    node@22.21.1
    @openai/codex@0.166.0
    opencode-ai@1.18.33
    @qwen-code/qwen-code@0.24.4
)

if [ -f "$ready" ] && cmp -s <(cat "$wanted"; printf '%s\n' "${node[@]}") "$ready"; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$wanted"
"$venv/bin/python" -c 'import anthropic, openai, agents, minisweagent'
npm install --prefix "$venv" --no-audit --no-fund --loglevel=error --no-save "${node[@]}"
"$venv/node_modules/.bin/codex" --version
(cat "$wanted"; printf '%s\n' "${node[@]}") >"$ready"
