#!/usr/bin/env bash
# Long checks of what the README claims, on data larger than the repository carries (`scripts/data.sh` makes it):
# `scripts/prove.sh NAME`, and without a name the list of them. A lane that was interrupted goes on where it stopped;
# results are in out/prove/. Tests run the same code on less data.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

cargo build --release --locked --workspace --bins
exec cargo run --release --locked --quiet -p shine-sim -- prove "$@"
