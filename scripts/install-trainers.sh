#!/usr/bin/env bash
# Installs trainers that people already have into environments of their own, beside Lockstep as it
# stands here: TRL and verifiers into .venv-trl. Does nothing where that was done already.
set -euo pipefail
cd -P "$(dirname "$0")/.."
python="${PYTHON:-python3}"

# install ENVIRONMENT CONSTRAINTS REQUIREMENT...
install() {
    local venv="$1" constraints="$2"
    shift 2
    local wanted
    wanted="$(cat pyproject.toml constraints.txt "$constraints"; echo "$@")"
    if [ -f "$venv/.ready" ] && [ "$wanted" = "$(cat "$venv/.ready")" ]; then
        return
    fi
    rm -f "$venv/.ready"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --constraint "$constraints" "$@"
    "$venv/bin/python" -m pip check
    printf '%s\n' "$wanted" >"$venv/.ready"
}

install .venv-trl scripts/trl-constraints.txt --editable '.[trl,verifiers]' 'trl==1.16.0' 'verifiers==0.4.0'
