#!/usr/bin/env bash
# Installs Arize Phoenix, which tests of sinks send traces to, into an environment of its own
# (.venv-phoenix) on top of .venv-sinks and .venv, whose packages it uses where they fit.
# Does nothing when that was done already.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-phoenix}"
wanted="scripts/phoenix-requirements.txt"
ready="$venv/.ready"

if [ -f "$ready" ] && cmp -s "$wanted" "$ready"; then
    exit 0
fi
scripts/install-sinks.sh
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || .venv/bin/python -m venv --clear "$venv"
for each in .venv-sinks .venv; do
    "$each/bin/python" -c 'import site; print(site.getsitepackages()[0])'
done >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/lockstep-venv.pth"
# Without constraints.txt, of which botocore refuses a version.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$wanted"
cp "$wanted" "$ready"
