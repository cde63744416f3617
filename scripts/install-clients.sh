#!/usr/bin/env bash
# Installs the clients of the real-clients suite into a virtual environment of their own (default
# .venv-clients): SDKs, agent frameworks, verifiers; those for Node in its node_modules, with the Node
# that they need. Does nothing when that was done already.
#
# Every version is pinned and nothing is resolved: no torch, and not what only a user interface needs.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-clients}"
python="${PYTHON:-python3}"
wanted="scripts/clients-requirements.txt"
ready="$venv/.ready"
node=(
    node@22.21.1
    ai@7.0.173
    @ai-sdk/openai@4.0.118
    zod@4.6.7
)

if [ -f "$ready" ] && cmp -s <(cat "$wanted"; printf '%s\n' "${node[@]}") "$ready"; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$wanted"
LITELLM_LOCAL_MODEL_COST_MAP=True "$venv/bin/python" -c 'import openai, litellm, verifiers'
npm install --prefix "$venv" --no-audit --no-fund --loglevel=error --no-save "${node[@]}"
(cat "$wanted"; printf '%s\n' "${node[@]}") >"$ready"
