#!/usr/bin/env bash
# From a fresh machine to the main job: builds shine, starts three memory nodes, five compute nodes and an oracle as
# processes that talk over QUIC, loads the shipped data set, and measures recall against queries per second. Leaves
# the result and the picture in out/. Arguments go to `shine-sim loopback`, after its defaults.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

cargo build --release --locked -p shine-oracle -p shine-mn -p shine-cn -p shine-sim
mkdir -p out
cargo run --release --locked --quiet -p shine-sim -- loopback \
    --base data/glove100-50k/base.i8bin --queries data/glove100-50k/query.i8bin --truth data/glove100-50k/truth.ibin \
    --metric l2 --json out/demo.json --svg out/demo.svg "$@"
