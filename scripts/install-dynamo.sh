#!/usr/bin/env bash
# Installs NVIDIA Dynamo and Lockstep with its engine into one virtual environment.
#
#     scripts/install-dynamo.sh [DIRECTORY]      (.venv-dynamo unless given)
#
# Run again, it does nothing unless this file, pyproject.toml or constraints.txt has changed.
set -euo pipefail
cd -P "$(dirname "$0")/.."

VENV="${1:-.venv-dynamo}"
PYTHON="${PYTHON:-python3}"
DYNAMO=1.6.1

wanted="$(cat "$0" pyproject.toml constraints.txt | sha256sum)"
if [ -f "$VENV/.ready" ] && [ "$(cat "$VENV/.ready")" = "$wanted" ]; then
    exit 0
fi

"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
pip() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

# Dynamo asks for a pydantic before 2.14; everything else is as in Lockstep's own environment.
limits="$(mktemp)"
trap 'rm -f "$limits"' EXIT
grep -E '^[A-Za-z0-9_.-]+==' constraints.txt | grep -iv '^pydantic' > "$limits"
echo 'pydantic<=2.13.5' >> "$limits"

# Without dependencies: ai-dynamo pins a planner's simulator that the public index does not have,
# and that neither the frontend nor a worker imports.
pip --no-deps "ai-dynamo==$DYNAMO" "ai-dynamo-runtime==$DYNAMO"
pip --constraint "$limits" pydantic uvloop packaging PyYAML msgspec typing_extensions
# The worker runs Lockstep's engine inside Dynamo's Python.
pip --constraint "$limits" --editable '.[engine]'

"$VENV/bin/python" -c 'import dynamo.llm, dynamo.runtime, lockstep.engine'
echo "$wanted" > "$VENV/.ready"
