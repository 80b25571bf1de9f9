#!/usr/bin/env bash
# Long checks of what the README claims, on data larger than the repository carries: `scripts/prove.sh LANE [--anew]`,
# and without a name the list of them. A lane that was interrupted goes on where it stopped; results are in out/prove/.
# Tests run the same code on less data.
#
# Lanes that are programs of their own:
#   fuzz     every decoder under libFuzzer, `fuzz SECONDS` (300) for each; what it found and how much it tried
#   gather   CPU and records per second of a gather over QUIC, against TLS over TCP and against QUIC's default settings
#   synth    made data is as hard as the real sets it imitates: recall of hnswlib on 100,000 rows of each shape
# All others: see the list. They want the data of `scripts/data.sh`, or SHINE_DATA set to a folder that has it.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
mkdir -p out/prove

# Coverage as libFuzzer wants it; options of the compiler that stable has.
coverage="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1"

# Runs each target from where it stopped (its corpus stays in out/prove/fuzz) and writes a line of JSON for each.
fuzz() {
    local seconds=${1:-300} folder=$PWD/out/prove/fuzz host built name found failed=0
    host=$(rustc -vV | sed -n 's/^host: //p')
    built=${CARGO_TARGET_DIR:-$PWD/target}/fuzz-coverage
    # With a target named, build scripts and macros are compiled without coverage.
    RUSTFLAGS=$coverage cargo build --locked --quiet --profile fuzz -p shine-fuzz --features libfuzzer \
        --target "$host" --target-dir "$built"
    mkdir -p "$folder"
    : >"$folder/results.jsonl"
    for name in frames messages lists vectors truth graph; do
        mkdir -p "$folder/$name" "$folder/seeds/$name" "$folder/found"
        cargo run --locked --quiet --example seeds -p shine-fuzz -- "$name" "$folder/seeds/$name"
        if "$built/$host/fuzz/fuzz-$name" "$folder/$name" "$folder/seeds/$name" -max_total_time="$seconds" -max_len=16384 \
            -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 -artifact_prefix="$folder/found/$name-" \
            >"$folder/$name.log" 2>&1; then
            found=0
        else
            found=1 failed=1
        fi
        awk -v name="$name" -v seconds="$seconds" -v found="$found" '
            /stat::number_of_executed_units/ { units = $2 }
            /stat::peak_rss_mb/ { rss = $2 }
            / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") cov = $(i + 1) }
            END { printf "{\"decoder\":\"%s\",\"seconds\":%d,\"executions\":%d,\"edges\":%d,\"peak_rss_mb\":%d,\"found\":%d}\n",
                  name, seconds, units, cov, rss, found }' "$folder/$name.log" | tee -a "$folder/results.jsonl"
    done
    if [ "$failed" -ne 0 ]; then
        echo "prove: a decoder failed; inputs are in $folder/found, what was said in $folder/*.log" >&2
        exit 1
    fi
}

case ${1:-} in
    fuzz)
        fuzz "${2:-300}"
        exit
        ;;
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
