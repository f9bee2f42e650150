#!/usr/bin/env bash
# Sets up and runs all tests, or with arguments the tests that pytest selects by them. `make test` calls this.
#
#   setup ─► system packages ─┬─► lint ─────────────────────┐
#                             ├─► the rest ─────────────────┤
#   test bed (Go) ────────────┼─► cluster ──────────────────┼─► quiet ─► what failed, core-seconds by folder
#                             └─► control plane, engines ───┘
#
# Tests that start clusters mostly wait, and the other tests mostly compute, so they run in parallel, in lanes of about the same
# length. Tests that assert a limit in seconds (marked `quiet`) run last, when nothing else runs. Fails when any part fails, and
# lists the failures at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
# A process that computes on all cores would slow the other lanes, and its threads spin while they wait for each other.
export OMP_NUM_THREADS=1
CONTROL_PLANE=(tests/controlplane tests/helm)
CLUSTER=(tests/cluster)
ENGINES=(tests/distributed tests/engines tests/gpu tests/recipes)
SIMULATOR=(tests/simulate tests/simulate_cli) # in the lane of the engines, so that lanes are of about the same length

set_up() { make --no-print-directory "$@"; }

if [[ $# -gt 0 ]]; then
    set_up setup && set_up system || exit 1
    if [[ " $* " =~ \ tests/?\ |tests/(controlplane|cluster|helm) ]]; then set_up testbed || exit 1; fi
    exec python -m pytest "$@"
fi

if [[ -z ${QWEN35_TESTS_RESULTS:-} ]]; then
    QWEN35_TESTS_RESULTS=$(mktemp -d)
    trap 'rm -rf "$QWEN35_TESTS_RESULTS"' EXIT
fi
export QWEN35_TESTS_RESULTS

mkdir -p "$QWEN35_TESTS_RESULTS"
if [[ -n $(ls -A "$QWEN35_TESTS_RESULTS") ]]; then
    echo "QWEN35_TESTS_RESULTS=$QWEN35_TESTS_RESULTS holds files, maybe of an earlier run: name a new or empty folder" >&2
    exit 1
fi
verdict=$QWEN35_TESTS_RESULTS/set-up

logged() { # name, command
    local name=$1 code log=$QWEN35_TESTS_RESULTS/$1.log; shift
    "$@" 2>&1 | tee "$log" | sed -u "s/^/$name │ /"
    code=$?
    [[ $code -eq 0 ]] || echo "FAILED $name, exit code $code" >>"$log"
    return $code
}
lane() { logged "$1" python -u -m pytest "${@:2}"; } # name, arguments of pytest
clusters() { # starts as soon as the test bed and the rest of the set-up are ready
    logged "test bed" set_up testbed || return 1
    until [[ -s $verdict ]]; do kill -0 $$ && sleep 0.5 || return 1; done
    [[ $(<"$verdict") == done ]] || return 1
    lane "control plane, engines" -m "not quiet" "${CONTROL_PLANE[@]}" "${ENGINES[@]}" "${SIMULATOR[@]}" &
    local other=$! failed=0
    lane "cluster" -m "not quiet" "${CLUSTER[@]}" || failed=1
    wait "$other" || failed=1
    return $failed
}

clusters &
clusters=$!
set_up setup && set_up system && echo done >"$verdict" || { echo failed >"$verdict"; wait "$clusters"; exit 1; }
failed=0
logged lint set_up lint &
lint=$!
elsewhere=("${CONTROL_PLANE[@]}" "${CLUSTER[@]}" "${ENGINES[@]}" "${SIMULATOR[@]}")
lane "the rest" -m "not quiet" "${elsewhere[@]/#/--ignore=}" || failed=1
wait "$lint" || failed=1
wait "$clusters" || failed=1
# Folders run one after the other, so that the control plane of one does not run during the timed tests of another. Only files
# with such tests are collected, because collecting all files imports torch and many other packages.
files_with_quiet() { grep -rl --include='test_*.py' 'mark\.quiet' "$1" | sort; }
for folder in $(files_with_quiet tests | cut -d/ -f1,2 | uniq); do
    mapfile -t files < <(files_with_quiet "$folder")
    lane "quiet ${folder#tests/}" -m quiet "${files[@]}" || failed=1
done
python -m tests.core_seconds "$QWEN35_TESTS_RESULTS" || failed=1
grep -hE "^(FAILED|ERROR) |^=+ .* in [0-9.]+s" "$QWEN35_TESTS_RESULTS"/*.log
exit $failed
