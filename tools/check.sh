#!/usr/bin/env bash
# A quick check between edits: lint, and in parallel the tests that start no process and, unless TORCH=1, do not import torch
# (tests/check.py). `make check` calls this script.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# Each half takes about the same time, on two cores. The output of the second half follows that of the first.
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
