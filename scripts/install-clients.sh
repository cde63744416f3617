#!/usr/bin/env bash
# Installs the clients of the real-clients suite into a virtual environment of their own (default
# .venv-clients): SDKs, agent frameworks, verifiers. Does nothing when that was done already.
#
# Every version is pinned and nothing is resolved: no torch, and not what only a user interface needs.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-clients}"
python="${PYTHON:-python3}"
wanted="scripts/clients-requirements.txt"
ready="$venv/.ready"

if [ -f "$ready" ] && cmp -s "$wanted" "$ready"; then
    exit 0
fi
rm -f "$ready"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --requirement "$wanted"
LITELLM_LOCAL_MODEL_COST_MAP=True "$venv/bin/python" -c 'import openai, litellm, verifiers'
cp "$wanted" "$ready"
