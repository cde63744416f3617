#!/usr/bin/env bash
# Installs vLLM for CPU into a virtual environment of its own (default .venv-vllm), with Lockstep
# beside it for the worker extension. Does nothing when that was done already.
#
# Every version is pinned and nothing is resolved: torchvision, torchaudio and torchcodec (whose
# CUDA builds break the import), triton (1 GB, which only xgrammar asks for) and opencv stay out.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-vllm}"
python="${PYTHON:-python3}"
wanted="scripts/vllm-requirements.txt"
ready="$venv/.ready"

if [ -f "$ready" ] && cmp -s "$wanted" "$ready"; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" setuptools==78.1.1
"${pip[@]}" --no-deps --requirement "$wanted"
"${pip[@]}" --no-deps --no-build-isolation --editable .
"$venv/bin/python" -c 'import vllm.distributed.weight_transfer.factory, lockstep'
cp "$wanted" "$ready"
