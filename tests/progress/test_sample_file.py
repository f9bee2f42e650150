import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_trainer.progress.sample_file import (
    MAX_FILE_LINES,
    MAX_MOMENTS,
    Moment,
    Sample,
    SampleFile,
    newest_moments,
    read_samples,
    retained_moments,
    shorten,
    shorten_pieces,
)
from qwen35_trainer.progress.sample_section import sample_section


def sample(text: str = "8", **changes: object) -> Sample:
    fields = {"prompt_id": "train/5", "prompt": "3>8=", "response": ((0, text),), "tokens": 1, "reward": 1.0}
    return Sample(**fields | changes)  # type: ignore[arg-type]


def moment(update: int, kind: str = "trained", *samples: Sample) -> Moment:
    return Moment(kind=kind, update=update, version=update, samples=samples or (sample(),))  # type: ignore[arg-type]


def updates(moments: list[Moment], kind: str = "trained") -> list[int]:
    return [each.update for each in moments if each.kind == kind]


def test_moments_come_back_from_the_file(tmp_path: Path) -> None:
    odd = sample(
        '<b>"é😀\x00\u202e\n', answer=None, reward=None, scores={"a": 0.5}, errors={"b": "ill"}, truncated=True
    )
    moments = [moment(0, "held out"), moment(1, "trained", odd, sample())]
    file = SampleFile(tmp_path / "samples.jsonl")
    for each in moments:
        file.add(each)
    assert read_samples(tmp_path / "samples.jsonl") == moments
    assert read_samples(tmp_path / "nowhere.jsonl") == []


def test_a_resumed_run_cuts_off_a_torn_line_and_repeats_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = SampleFile(path)
    for update in (1, 2, 3):
        first.add(moment(update))
    first.add(moment(2, "held out"))
    path.write_text(path.read_text() + '{"kind":"trai')
    again = SampleFile(path)
    again.add(moment(2, "trained", sample("again")))
    samples = read_samples(path)
    assert (updates(samples), updates(samples, "held out")) == ([1, 2], [2])
    assert [each.samples[0].response for each in samples] == [((0, "8"),), ((0, "again"),), ((0, "8"),)]


@given(last=st.integers(1, 5000), every=st.integers(1, 7))
def test_of_a_long_run_evenly_spread_moments_and_the_newest_are_kept(last: int, every: int) -> None:
    course = [moment(update) for update in range(1, last + 1, every)]
    kept = updates(retained_moments(course))
    assert kept[0] == 1
    assert kept[-1] == course[-1].update
    assert len(kept) <= MAX_MOMENTS + 1
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert max(gaps, default=0) <= 4 * max(every, last // MAX_MOMENTS)


def test_the_file_is_bounded_and_so_is_every_text_in_it(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "samples.jsonl")
    for update in range(1, 3 * MAX_FILE_LINES):
        file.add(moment(update))
        file.add(moment(update, "held out"))
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert len(lines) <= MAX_FILE_LINES
    samples = read_samples(tmp_path / "samples.jsonl")
    assert {len(updates(samples, kind)) <= MAX_MOMENTS + 1 for kind in ("trained", "held out")} == {True}
    assert (samples[0].update, samples[-1].update) == (1, 3 * MAX_FILE_LINES - 1)


def test_the_newest_are_the_last_of_each_kind() -> None:
    moments = [moment(0, "held out"), moment(1), moment(2), moment(3, "held out"), moment(3)]
    assert newest_moments(moments) == [moment(3, "held out"), moment(3)]


def test_a_long_text_is_cut_in_its_middle_with_a_note() -> None:
    text = "a" * 900 + "b" * 600 + "c" * 901
    cut = shorten(text, 1000)
    assert cut == f"{'a' * 500} … 1,401 characters omitted … {'c' * 500}"
    assert shorten(text, 2401) == text
    pieces = shorten_pieces([(2, "a" * 900), (1, "b" * 600), (0, "c" * 901)], 1000)
    assert [(lag, text[:3]) for lag, text in pieces] == [(2, "aaa"), (None, " … "), (0, "ccc")]


def test_half_a_character_is_written_as_an_escape() -> None:
    assert shorten("a\ud83d", 10) == "a\\ud83d"


@pytest.mark.parametrize(
    ("line", "why"),
    [("{", "line 1: not JSON"), ('{"kind":"guess"}', "line 1: kind: Input should be"), ("\xff", "line 1: not JSON")],
)
def test_a_line_that_is_not_a_moment_is_refused_with_its_place(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=rf"samples.jsonl, {why}"):
        read_samples(path)


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    SampleFile(tmp_path / "samples.jsonl").add(moment(1))
    line = json.loads((tmp_path / "samples.jsonl").read_text()) | {"invented_later": 1}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    assert read_samples(tmp_path / "samples.jsonl") == [moment(1)]


# The section of the report.


def test_texts_of_the_model_stay_texts() -> None:
    evil = "</dd><script>throw 1</script>\x00\x1b[31m\r\n"
    html = sample_section(
        [moment(1, "trained", sample(evil, prompt=evil, prompt_id=evil, answer=evil, errors={"r": evil}))], 4
    )
    assert "<script>" not in html
    assert html.count("&lt;/dd&gt;&lt;script&gt;throw 1&lt;/script&gt;␀␛[31m\n") == 5


def test_the_colour_behind_a_token_grows_with_its_lag() -> None:
    response = ((2, "old"), (None, " … 9 characters omitted … "), (0, "new"))
    html = sample_section([moment(7, "trained", sample(response=response))], 4)
    assert '<span style="--lag:30%" title="lag 2">old</span><i> … 9 characters' in html
    assert '<span style="--lag:0%" title="lag 0">new</span>' in html


def test_a_sample_shows_its_rewards_and_what_is_odd_about_it() -> None:
    html = sample_section(
        [
            moment(
                1234,
                "held out",
                sample(response=(), truncated=True, reward=None, scores={"a": 0.5, "b": 1.0}, errors={"c": "ill"}),
            )
        ],
        None,
    )
    assert "after update 1,234 <small>reward –</small>" in html
    assert "<i>empty</i>" in html
    assert "train/5 · reward – (a 0.500, b 1.000) · 1 token · truncated at the limit · c failed: ill" in html


def test_the_newest_moment_of_each_kind_is_open_and_the_others_are_folded() -> None:
    html = sample_section([moment(0, "held out"), moment(1), moment(2), moment(3), moment(3, "held out")], 4)
    assert html.count("<details") == 5 + 2
    assert html.count(" open>") == 2
    assert "2 earlier" in html
    assert sample_section([], 4) == ""
