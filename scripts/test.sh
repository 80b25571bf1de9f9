#!/usr/bin/env bash
# Set-up and all tests: units, properties, whole clusters of real processes, documentation examples. Arguments go to
# the test runner: `scripts/test.sh -p shine-common metric`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh curl
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

# Everything at once, with one set of features: cluster tests find the binaries, and nothing is compiled twice.
cargo build --workspace --all-targets

if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --workspace --no-tests=pass "$@"
else
    cargo test --workspace --all-targets "$@"
fi
[ $# -gt 0 ] || cargo test --workspace --doc
