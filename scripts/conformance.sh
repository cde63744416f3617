#!/usr/bin/env bash
# Runs `lockstep check` against a server that it starts, and puts the table into docs/conformance.md.
#
#     scripts/conformance.sh [lockstep|moe|gateway|vllm|vllm-plain|sglang|dynamo]...     (lockstep unless given)
#
# vllm, sglang and dynamo need the environments of scripts/install-ENGINE.sh.
# Everything listens on 127.0.0.1 and is stopped at the end. PYTHON is the python of Lockstep's own
# environment (.venv unless set), and PRINT=1 prints the tables instead.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.
PYTHON="$(realpath -s "${PYTHON:-.venv/bin/python}")"
WORK="$(mktemp -d)"
SERVER=
trap 'stop; rm -rf "$WORK"' EXIT

stop() {
    if [ -n "$SERVER" ]; then
        kill -INT "$SERVER" 2>/dev/null || true
        wait "$SERVER" 2>/dev/null || true
        SERVER=
    fi
}

# start COMMAND...: in the background; waits for the JSON line that says where it is.
start() {
    : >"$WORK/ready"
    "$@" >"$WORK/ready" 2>"$WORK/log" &
    SERVER=$!
    for _ in $(seq 900); do
        [ -s "$WORK/ready" ] && return
        kill -0 "$SERVER" 2>/dev/null || break
        sleep 0.5
    done
    tail -30 "$WORK/log" >&2
    exit 1
}

# ready FIELD: what the server said of itself.
ready() { "$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$WORK/ready" "$1"; }

# other MODEL: weights that differ from a bundled model's, with a probe; and two adapters.
other() {
    [ -d "$WORK/$1" ] || "$PYTHON" - "$1" "$WORK" 2>/dev/null <<'PY'
import sys
from pathlib import Path
from tests.check.conftest import perturbed
from tests.worker.adapters import write_adapter

name, work = sys.argv[1], Path(sys.argv[2])
perturbed(name, work / name)
for seed, adapter in enumerate("ab"):
    write_adapter(work / f"adapter-{adapter}", seed=seed)
PY
}

# table NAME URL [options]: asks, and puts the table where the page has its marks.
table() {
    local name="$1" url="$2" model="${MODEL:-tiny}" status=0
    shift 2
    "$PYTHON" -m lockstep check "$url" --tokenizer "src/lockstep/models/$model" --markdown "$@" \
        >"$WORK/$name.md" || status=$?
    [ "$status" -le 1 ] || exit "$status"
    echo "$name: $(tail -1 "$WORK/$name.md")" >&2
    if [ -n "${PRINT:-}" ]; then
        cat "$WORK/$name.md"
        return
    fi
    "$PYTHON" - "$name" "$WORK/$name.md" <<'PY'
import re
import sys
from pathlib import Path

name, table, page = sys.argv[1], Path(sys.argv[2]).read_text().strip(), Path("docs/conformance.md")
marks = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
text, count = marks.subn(lambda found: found[1] + table + "\n" + found[2], page.read_text())
if count != 1:
    sys.exit(f"{page} has {count} places for the table {name!r}, expected 1")
page.write_text(text)
PY
}

mutating() {
    other "${MODEL:-tiny}"
    MUTATE=(--mutate --checkpoint "$WORK/${MODEL:-tiny}")
    [ "${MODEL:-tiny}" != tiny ] || MUTATE+=(--adapter "$WORK/adapter-a" --adapter "$WORK/adapter-b")
}

vllm_server() {
    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 \
        VLLM_CPU_KVCACHE_SPACE=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1 \
        "$PWD/.venv-vllm/bin/python" -m vllm.entrypoints.openai.api_server \
        --model src/lockstep/models/tiny --served-model-name tiny --host 127.0.0.1 \
        --port "$VLLM_PORT" --enable-scale-out --enable-lora --max-lora-rank 8 \
        --max-model-len 2048 --max-num-seqs 16 --dtype float32 "$@" >"$WORK/log" 2>&1 &
    SERVER=$!
    for _ in $(seq 240); do
        curl -sf "http://127.0.0.1:$VLLM_PORT/health" >/dev/null && return
        kill -0 "$SERVER" 2>/dev/null || break
        sleep 1
    done
    tail -30 "$WORK/log" >&2
    exit 1
}

VLLM_PORT="${VLLM_PORT:-18431}"
export LOCKSTEP_ADMIN_TOKEN="${LOCKSTEP_ADMIN_TOKEN:-conformance-token}"
for which in "${@:-lockstep}"; do
    MODEL=tiny
    case "$which" in
    lockstep)
        mutating
        start "$PYTHON" -m lockstep worker tiny --max-model-len 2048
        table lockstep "$(ready url)" --admin "$(ready system_url)" "${MUTATE[@]}"
        ;;
    moe)
        MODEL=tiny-moe
        start "$PYTHON" -m lockstep worker tiny-moe --max-model-len 2048
        table moe "$(ready url)" --only 'experts.*' --only 'scores.*'
        ;;
    gateway)
        start "$PYTHON" -m lockstep serve tiny --workers 2 --json --port 0 --admin-port 0
        table gateway "$(ready url)"
        ;;
    vllm | vllm-plain)
        mutating
        extension=(--worker-extension-cls lockstep.backends.vllm.extension.worker.LockstepWorker
            --weight-transfer-config '{"backend": "lockstep"}')
        [ "$which" = vllm ] || extension=()
        vllm_server "${extension[@]}"
        url="http://127.0.0.1:$VLLM_PORT"
        table "$which" "$url" --admin "$url" "${MUTATE[@]}"
        ;;
    sglang)
        mutating
        HF_HUB_OFFLINE=1 start "$PYTHON" -m lockstep serve tiny --engine sglang --json --port 0 \
            --admin-port 0 --sessions memory -- --context-length 4096 --enable-lora \
            --max-lora-rank 8 --lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj \
            down_proj
        url="$("$PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))["workers"][0]["url"])' \
            "$WORK/ready")"
        table sglang "$url" --admin "$url" "${MUTATE[@]}"
        ;;
    dynamo)
        mutating
        start "$PYTHON" -m lockstep dynamo up tiny --workers 1 --port 0 --rl-port 0 --json \
            --python .venv-dynamo/bin/python --worker-args '--max-model-len 2048 --drain-seconds 2'
        table dynamo "$(ready url)" --admin "$(ready rl_url)" "${MUTATE[@]}"
        ;;
    *)
        sed -n '2,8p' "$0" >&2
        exit 2
        ;;
    esac
    stop
done
