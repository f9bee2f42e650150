"""Processor time and requests between samples: benchmarks/process_samples.py."""

import pytest

from benchmarks.process_samples import OperatorUse, ProcessUse, Sample, memory_of_runs, processor_seconds, requests_sent


def sample(at, uses, requests=None):
    """A sample of the process `a`. uses: its process id and processor seconds; None if it does not run."""
    processes = {} if uses is None else {"a": ProcessUse(*uses, rss_mib=10.0, peak_rss_mib=12.0)}
    operators = {} if requests is None else {"a": OperatorUse(requests, 0, 0, leading=True)}
    return Sample(at, 0.0, processes, operators)


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([(1, 5.0), (1, 7.0), (1, 9.5)], 4.5),
        ([(1, 5.0), (1, 7.0), None, (2, 1.0), (2, 3.0)], 5.0),
        ([(1, 5.0), (2, 8.0)], 8.0),
        ([None, (1, 3.0), (1, 4.0)], 4.0),
        ([None, None], 0.0),
    ],
)
def test_processor_time_continues_after_a_restart(uses, expected):
    samples = [sample(at, use) for at, use in enumerate(uses)]
    assert processor_seconds(samples, "a") == expected


def test_requests_continue_after_a_restart():
    samples = [sample(at, None, count) for at, count in enumerate([100, 150, None, 20, 30])]
    assert requests_sent(samples, "a") == 50 + 20 + 10


def test_each_run_of_a_process_has_its_own_memory():
    uses = [ProcessUse(1, 0, 90.0, 95.0), ProcessUse(1, 0, 92.0, 95.0), None, ProcessUse(2, 0, 60.0, 60.0)]
    samples = [Sample(at, 0, {} if use is None else {"a": use}, {}) for at, use in enumerate(uses)]
    assert memory_of_runs(samples, "a") == [[90.0, 92.0], [60.0]]
    assert memory_of_runs(samples, "b") == []
