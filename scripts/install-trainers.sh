#!/usr/bin/env bash
# Installs trainers that people already have into environments of their own, beside Lockstep as it
# stands here: TRL and verifiers into .venv-trl; the SDK and the recipes of Tinker, which need an
# older transformers and only a URL of Lockstep's, into .venv-tinker. Does nothing where that was
# done already.
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
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint constraints.txt --constraint "$constraints" "$@"
    "$venv/bin/python" -m pip check
    printf '%s\n' "$wanted" >"$venv/.ready"
}

install .venv-trl scripts/trl-constraints.txt --editable '.[trl,verifiers]' 'trl==1.16.0' 'verifiers==0.4.0'

tinker="scripts/tinker-requirements.txt"
if ! cmp -s "$tinker" .venv-tinker/.ready; then
    rm -f .venv-tinker/.ready
    ".venv-tinker/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv-tinker
    .venv-tinker/bin/python -m pip install --quiet --disable-pip-version-check --requirement "$tinker"
    .venv-tinker/bin/python -c 'import tinker, tinker_cookbook'
    cp "$tinker" .venv-tinker/.ready
fi
