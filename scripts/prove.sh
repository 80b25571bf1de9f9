#!/usr/bin/env bash
# Long checks of what the README claims, on data larger than the repository carries: `scripts/prove.sh LANE [--anew]`,
# and without a name the list of them. A lane that was interrupted goes on where it stopped; results are in out/prove/.
# Tests run the same code on less data.
#
# Lanes that are programs of their own:
#   gather   CPU and records per second of a gather over QUIC, against TLS over TCP and against QUIC's default settings
#   synth    made data is as hard as the real sets it imitates: recall of hnswlib on 100,000 rows of each shape
# All others: see the list. They want the data of `scripts/data.sh`, or SHINE_DATA set to a folder that has it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
mkdir -p out/prove

case ${1:-} in
    gather)
        shift
        exec cargo bench --locked -p shine-common --bench gather -- --json "$PWD/out/prove/gather.json" "$@"
        ;;
    synth)
        shift
        cargo build --release --locked --workspace --bins
        exec scripts/python.sh numpy hnswlib -- scripts/synth_hardness.py "${CARGO_TARGET_DIR:-target}/release/shine" \
            --out out/prove/synth.json "$@"
        ;;
    '' | -h | --help)
        sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
        echo
        ;;
esac
cargo build --release --locked --workspace --bins
exec cargo run --release --locked --quiet -p shine-sim -- prove "$@"
