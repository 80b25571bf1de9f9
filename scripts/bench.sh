#!/usr/bin/env bash
# Our bulk builder and local search against hnswlib, usearch and hnsw_rs, in one run on this machine: speeds, recall beside
# each, and their ratios as the median of interleaved rounds with a 95 % bootstrap interval. Results also go to
# out/bench/peers.json. `--quick` takes 20,000 rows and fewer rounds; `--help` lists the rest.
# About 15 minutes on two quiet cores; with data other than glove100 under SHINE_DATA: `--base FILE --queries FILE`.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
exec scripts/python.sh numpy hnswlib usearch -- scripts/bench.py "$@"
