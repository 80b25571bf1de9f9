#!/usr/bin/env bash
# Runs a Python script with packages out of scripts/requirements.txt:
#     scripts/python.sh numpy -- scripts/glove.py ARGUMENTS
# They live in an environment of their own under the cache folder, made at the first call.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

packages=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    packages+=("$1")
    shift
done
[ $# -ge 2 ] || { echo "usage: scripts/python.sh PACKAGE... -- SCRIPT ARGUMENTS..." >&2; exit 2; }
shift

venv=${XDG_CACHE_HOME:-$HOME/.cache}/shine/python
if [ ! -x "$venv/bin/pip" ]; then
    "$here/setup.sh" python3 python3-venv python3-dev
    python3 -m venv "$venv"
fi
for package in "${packages[@]}"; do
    wanted=$(grep -E "^${package}[=<>]" "$here/requirements.txt") || { echo "python: requirements.txt has no $package" >&2; exit 2; }
    if ! "$venv/bin/pip" show -q "$package" >/dev/null 2>&1; then
        echo "python: installing $wanted" >&2
        "$venv/bin/pip" install -q --disable-pip-version-check "$wanted" >&2
    fi
done
exec "$venv/bin/python" "$@"
