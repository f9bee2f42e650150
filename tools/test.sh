#!/usr/bin/env bash
# All tests, in two lanes side by side: what starts clusters waits much and computes little, the rest is the other way
# round. Arguments go to both pytests. Fails when either does; the summary of each lane stands at its end.
set -uo pipefail
# A process that computes on all cores takes those of the other lane, and its threads spin while they wait for each other.
export OMP_NUM_THREADS=1
CLUSTERS=(tests/controlplane tests/cluster tests/helm)

lane() { # name, arguments of pytest
    local name=$1; shift
    python -u -m pytest "$@" 2>&1 | sed -u "s/^/$name │ /"
}

lane "clusters" "${CLUSTERS[@]}" "$@" &
clusters=$!
lane "the rest" "${CLUSTERS[@]/#/--ignore=}" "$@"
rest=$?
wait "$clusters"
clusters=$?
exit $((rest || clusters))
