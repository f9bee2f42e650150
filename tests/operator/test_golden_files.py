"""A golden file that is written is never green in the run that wrote it."""

import pytest

from tests.operator import golden


def test_a_difference_fails_and_an_update_fails_too_until_it_was_read(tmp_path, monkeypatch):
    file = tmp_path / "golden.txt"
    with pytest.raises(pytest.fail.Exception, match="run with UPDATE_GOLDEN=1"):
        golden.compare("new", file)
    monkeypatch.setenv("UPDATE_GOLDEN", "1")
    with pytest.raises(pytest.fail.Exception, match=r"updated .*golden\.txt: read the difference"):
        golden.compare("new", file)
    golden.compare("new", file)
    monkeypatch.delenv("UPDATE_GOLDEN")
    golden.compare("new", file)
    with pytest.raises(pytest.fail.Exception, match=r"-new\n\+newer"):
        golden.compare("newer", file)
    assert file.read_text() == "new"


def test_what_means_the_same_need_not_be_written_the_same(tmp_path):
    file = tmp_path / "golden.txt"
    file.write_text("NEW")
    golden.compare("new", file, str.lower)
