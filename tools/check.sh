#!/usr/bin/env bash
# For the minutes between two edits: lint beside the tests that start no process and, unless TORCH=1, import no torch
# (tests/check.py). `make check` calls this.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# About half of the work each, on two cores; what the second one says comes when the first is through.
HALF=(tests/operator tests/pipeline)
second=$(mktemp)
trap 'rm -f "$second"' EXIT
make --no-print-directory lint &
lint=$!
python -m pytest -p tests.check -q "${HALF[@]}" >"$second" 2>&1 &
half=$!
failed=0
python -m pytest -p tests.check -q tests "${HALF[@]/#/--ignore=}" || failed=1
wait "$half" || failed=1
cat "$second"
wait "$lint" || failed=1
exit $failed
