#!/usr/bin/env bash
# Form, lints, documentation, scripts, and the repository's own rules (tests/tests/tidy). All are run; the exit code
# says whether any failed.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh shellcheck
export PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"

failed=()
step() {
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

step fmt cargo fmt --all --check
step clippy cargo clippy --workspace --all-targets --quiet -- -D warnings
step doc env RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
step shellcheck shellcheck -x scripts/*.sh .ci/run
step tidy cargo test --workspace --quiet --test tidy

if [ ${#failed[@]} -gt 0 ]; then
    echo "check: failed: ${failed[*]}" >&2
    exit 1
fi
echo "check: all passed"
