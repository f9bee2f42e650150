"""What one side writes, the other reads; anything else is refused with the name of the key and the place."""

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qwen35_trainer.contract import (
    CheckpointReport,
    ContractError,
    Control,
    LiveSettings,
    ProgressReport,
    ReplicaReport,
    StopOrder,
    parse_control,
    parse_progress,
)
from qwen35_trainer.contract.message import MAX_MESSAGE_BYTES

counts = st.integers(0, 2**63 - 1)
numbers = st.floats(0, 1e12, allow_nan=False)
times = st.floats(0, 2.5e11, allow_nan=False)
words = st.text(min_size=1, max_size=64)
controls = st.builds(
    Control,
    attempt=st.integers(1, 10_000),
    stop=st.none() | st.builds(StopOrder, id=words, reason=words, time=numbers),
    rolloutNodes=st.integers(0, 1024),
    leaving=st.lists(words, max_size=4).map(tuple),
    leavingSince=st.none() | numbers,
    live=st.none()
    | st.builds(
        LiveSettings,
        checkpointEveryUpdates=st.integers(1),
        checkpointKeep=st.integers(1),
        evaluationEveryUpdates=st.integers(0),
        checkpointExport=st.sampled_from(["None", "AtEnd", "EveryCheckpoint"]),
    ),
)
reports = st.builds(
    ProgressReport,
    attempt=st.integers(1, 10_000),
    state=st.sampled_from(["Running", "Succeeded", "Stopped", "Failed"]),
    time=times,
    stopAcknowledged=st.none() | words,
    reason=st.none() | words,
    message=words,
    warning=words,
    update=counts,
    updates=st.none() | counts,
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    checkpoint=st.none() | st.builds(CheckpointReport, uri=words, update=counts, time=times),
    export=st.none() | st.builds(CheckpointReport, uri=words, update=counts, time=times),
    replicas=st.lists(
        st.builds(ReplicaReport, pods=st.tuples(words), idle=st.floats(0, 1), drained=st.none() | st.booleans()),
        max_size=3,
    ).map(tuple),
)


@given(control=controls)
def test_an_order_is_read_as_it_was_written(control):
    assert parse_control(control.text()) == control


@given(progress=reports)
def test_a_report_is_read_as_it_was_written(progress):
    assert parse_progress(progress.text()) == progress


@given(progress=reports, news=st.dictionaries(st.text(min_size=1).map("new-{}".format), st.integers(), max_size=3))
def test_keys_of_a_newer_writer_are_ignored(progress, news):
    assert parse_progress(json.dumps(json.loads(progress.text()) | news)) == progress


@given(text=st.text() | st.recursive(st.none() | st.integers(), st.lists).map(json.dumps))
def test_any_text_that_is_not_a_message_is_refused(text):
    with pytest.raises(ContractError, match=r"^control\.json is not a Control: "):
        parse_control(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "Invalid JSON"),
        ("[]", "text: "),
        ('{"rolloutNodes": 2}', "attempt: Field required"),
        ('{"attempt": 0}', "attempt: "),
        ('{"attempt": "1"}', "attempt: "),
        ('{"attempt": 1, "stop": {"id": "", "reason": "", "time": 0}}', "stop.id: "),
        ('{"attempt": 1, "live": {"checkpointKeep": 1}}', "live.checkpointEveryUpdates: "),
    ],
)
def test_a_refusal_names_key_and_place(text, expected):
    with pytest.raises(ContractError) as caught:
        parse_control(text)
    assert str(caught.value).startswith("control.json is not a Control: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("time", ["1e12", "1e300", "253402300800", "1e999"])
def test_a_time_that_no_status_can_contain_is_refused(time):
    with pytest.raises(ContractError, match=r"time: |Invalid JSON"):
        parse_progress(f'{{"attempt": 1, "state": "Running", "time": {time}}}')
    last = parse_progress('{"attempt": 1, "state": "Running", "time": 253402300799}').time
    assert datetime.fromtimestamp(last, UTC).year == 9999


def test_a_message_of_absurd_length_is_not_even_parsed():
    with pytest.raises(
        ContractError,
        match=rf"progress.json has more than {MAX_MESSAGE_BYTES} bytes, which is the maximum",
    ):
        parse_progress(" " * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (ProgressReport, '{"attempt":1,"state":"Running","time":1.0,"replicas":[%s]}'),
        (ProgressReport, '{"attempt":1,"state":"Running","time":1.0,"replicas":[{"idle":0.0,"pods":[%s]}]}'),
        (Control, '{"attempt":1,"leaving":[%s]}'),
    ],
)
def test_a_list_of_wrong_items_has_one_error(kind, text):
    """100,000 errors would take the operator 200 MB."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(text % ",".join(["0"] * 100_000))
    assert caught.value.error_count() == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_has_no_word_for_are_never_written(value):
    with pytest.raises(ValidationError):
        ProgressReport(attempt=1, state="Running", time=0.0, reward=value)


def test_what_does_not_exist_is_left_out_of_the_text():
    written = json.loads(ProgressReport(attempt=1, state="Running", time=0.0).text())
    assert not {"reward", "checkpoint", "stopAcknowledged", "reason"} & written.keys()
