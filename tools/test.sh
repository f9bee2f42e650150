#!/usr/bin/env bash
# Sets up and runs all tests, or with arguments the tests that pytest selects by them. `make test` calls this.
#
#   setup ─► system packages ─┬─► lint ─────────────────────┐
#                             ├─► the rest ─────────────────┤
#                             ├─► runtime ─► cluster * ─────┼─► quiet ─► what failed, core-seconds by folder
#                             └─► control plane, engines * ─┘
#   test bed ─► * waits for it
#
# Tests that start clusters or whole runs often wait, and the other tests mostly compute, so they run in parallel, in lanes of
# about the same length. Whole runs need no test bed, so they run while Go builds it. Tests that assert a limit in seconds (marked
# `quiet`) run last, when nothing else runs. Fails when any part fails, and lists the failures at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
# A process that computes on all cores would slow the other lanes, and its threads spin while they wait for each other.
export OMP_NUM_THREADS=1
RUNTIME=(tests/runtime)
CLUSTER=(tests/cluster)
CONTROL_PLANE_AND_ENGINES=(tests/controlplane tests/helm tests/engines)

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
test_bed=$QWEN35_TESTS_RESULTS/test-bed

logged() { # name, command
    local name=$1 code log=$QWEN35_TESTS_RESULTS/$1.log; shift
    "$@" 2>&1 | tee "$log" | sed -u "s/^/$name │ /"
    code=$?
    [[ $code -eq 0 ]] || echo "FAILED $name, exit code $code" >>"$log"
    return $code
}
lane() { logged "$1" python -u -m pytest "${@:2}"; } # name, arguments of pytest
build_test_bed() { logged "test bed" set_up testbed && touch "$test_bed"; }
has_test_bed() { # waits until it is built, or cannot be built
    until [[ -e $test_bed ]]; do
        kill -0 "$builder" 2>/dev/null && kill -0 $$ && sleep 0.5 || break
    done
    [[ -e $test_bed ]]
}
runtime_then_cluster() {
    local failed=0
    lane "runtime" -m "not quiet" "${RUNTIME[@]}" || failed=1
    has_test_bed && lane "cluster" -m "not quiet" "${CLUSTER[@]}" || failed=1
    return $failed
}
control_plane_and_engines() {
    has_test_bed && lane "control plane, engines" -m "not quiet" "${CONTROL_PLANE_AND_ENGINES[@]}"
}

build_test_bed &
builder=$!
set_up setup && set_up system || { wait; exit 1; }
logged lint set_up lint &
lanes=($!)
runtime_then_cluster &
lanes+=($!)
control_plane_and_engines &
lanes+=($!)
failed=0
elsewhere=("${RUNTIME[@]}" "${CLUSTER[@]}" "${CONTROL_PLANE_AND_ENGINES[@]}")
lane "the rest" -m "not quiet" "${elsewhere[@]/#/--ignore=}" || failed=1
for started in "${lanes[@]}"; do wait "$started" || failed=1; done
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
