#!/usr/bin/env bash
# Installs SGLang for CPU into a virtual environment of its own (default .venv-sglang). Does nothing
# when that was done already.
#
# Every version is pinned and nothing is resolved: sglang asks for CUDA builds of torch, sgl_kernel,
# flashinfer and others, which a CPU neither needs nor can import. `lockstep serve --engine sglang`
# puts stand-ins for those that are imported on PYTHONPATH. triton (1 GB) must be the real one.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-sglang}"
python="${PYTHON:-python3}"
wanted="scripts/sglang-requirements.txt"
ready="$venv/.ready"

if [ -f "$ready" ] && cmp -s "$wanted" "$ready"; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --no-deps --requirement "$wanted"
PYTHONPATH=src/lockstep/backends/sglang/cpu_stubs SGLANG_USE_CPU_ENGINE=1 \
    "$venv/bin/python" -c 'import sglang.srt.entrypoints.http_server'
cp "$wanted" "$ready"
