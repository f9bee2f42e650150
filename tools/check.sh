#!/usr/bin/env bash
# For the minutes between two edits: lint beside the tests that start no process and, unless TORCH=1, import no torch
# (tests/check.py). `make check` calls this.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
make --no-print-directory lint &
lint=$!
failed=0
python -m pytest -p tests.check -q tests || failed=1
wait "$lint" || failed=1
exit $failed
