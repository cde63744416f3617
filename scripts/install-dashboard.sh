#!/usr/bin/env bash
# Installs what the tests of the dashboard drive a browser with into an environment of its own
# (default .venv-dashboard), and Debian's Chromium where there is none. Does nothing when that was
# done already.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-dashboard}"
python="${PYTHON:-python3}"
wanted="scripts/dashboard-requirements.txt"
ready="$venv/.ready"

if ! command -v chromium >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "there is no chromium here: install it with the packages of this system" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
fi
if [ -f "$ready" ] && cmp -s "$wanted" "$ready"; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$wanted"
"$venv/bin/python" -c 'import playwright.sync_api'
cp "$wanted" "$ready"
