#!/usr/bin/env bash
# What the other scripts need on a Debian or Ubuntu machine: a C toolchain (for ring), Rust, and the tools named as
# arguments (`scripts/setup.sh shellcheck`). Looks first; installs only what is missing. Safe to call each time.
set -euo pipefail
cd "$(dirname "$0")/.."

install() {
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || { echo "setup: missing packages ($*) and neither root nor sudo" >&2; exit 1; }
        as_root=(sudo)
    fi
    echo "setup: installing $*" >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2
}

missing=()
command -v cc >/dev/null || missing+=(build-essential)
for tool in "$@"; do
    case $tool in
        python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
        python3-dev) python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ;;
        *) command -v "$tool" >/dev/null ;;
    esac || missing+=("$tool")
done
if ! command -v cargo >/dev/null && [ ! -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
    command -v curl >/dev/null || missing+=(curl ca-certificates)
fi
[ ${#missing[@]} -eq 0 ] || install "${missing[@]}"

# rust-toolchain.toml names the version; rustup fetches it at the first call of cargo.
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
if ! command -v cargo >/dev/null; then
    echo "setup: installing rustup" >&2
    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y -q --no-modify-path --profile minimal --default-toolchain none >&2
fi
cargo --version >/dev/null
