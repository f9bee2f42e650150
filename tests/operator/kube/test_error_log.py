"""Which errors of a watch are warnings in the log."""

import pytest

from qwen35_operator.kube.error_log import MAX_MESSAGES, ErrorLog


@pytest.fixture
def errors() -> ErrorLog:
    return ErrorLog("pods in namespace team")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_new_cause_is_a_warning_however_many_there_were_before(errors, caplog) -> None:
    messages = [f"cause {number}" for number in range(MAX_MESSAGES + 5)]
    for message in messages:
        errors.failed(message)
    errors.failed(messages[-1])
    assert warnings(caplog) == messages


def test_the_memory_of_causes_is_limited(errors) -> None:
    for number in range(MAX_MESSAGES * 5):
        errors.failed(f"cause {number}")
    assert len(errors._messages) == MAX_MESSAGES


def test_an_error_whose_number_changes_is_one_warning(errors, caplog) -> None:
    for version in range(71_000, 71_100):
        errors.failed(f"500: Too large resource version: {version}, current: {version - 1}")
    errors.failed("403: pods is forbidden")
    assert warnings(caplog) == ["500: Too large resource version: 71000, current: 70999", "403: pods is forbidden"]


def test_an_error_after_the_watch_has_worked_is_a_warning_again(errors, caplog) -> None:
    errors.failed("403: pods is forbidden")
    errors.works()
    errors.failed("403: pods is forbidden")
    assert len(warnings(caplog)) == 2
