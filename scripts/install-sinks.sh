#!/usr/bin/env bash
# Installs the trackers that tests of sinks log to, and Hugging Face datasets that read exports,
# into an environment of their own (default .venv-sinks) on top of .venv, whose torch they use.
# Does nothing when that was done already.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-sinks}"
wanted="scripts/sinks-requirements.txt"
ready="$venv/.ready"

if [ -f "$ready" ] && cmp -s "$wanted" "$ready"; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || .venv/bin/python -m venv --clear "$venv"
.venv/bin/python -c 'import site; print(site.getsitepackages()[0])' \
    >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/lockstep-venv.pth"
echo "$PWD/src" >>"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/lockstep-venv.pth"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --requirement "$wanted"
"$venv/bin/python" -c 'import datasets, mlflow, tensorboard, torch, trackio, wandb'
cp "$wanted" "$ready"
