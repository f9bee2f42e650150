import json
from collections.abc import Mapping
from pathlib import Path

import datasets
import pytest

from qwen35_trainer.data import DataError, Prompt
from qwen35_trainer.data.prompt_files import read_prompts
from qwen35_trainer.manifest.data import SourceSpec


def source(*paths: str, **fields: object) -> SourceSpec:
    return SourceSpec.model_validate({"name": "sums", "files": {"paths": paths, **fields}})


def write_lines(path: Path, *rows: Mapping[str, object] | str) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def problems(raised: pytest.ExceptionInfo[DataError]) -> str:
    return "\n".join(raised.value.problems)


def test_rows_of_several_files_are_numbered_through_and_keep_their_other_fields(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.jsonl", {"prompt": "1+1=", "answer": "2", "level": 1}, "", {"prompt": "2+1=", "answer": 3}
    )
    write_lines(tmp_path / "b.jsonl", {"prompt": "0.5+0=", "answer": 0.5})
    assert list(read_prompts(source("a.jsonl", "b.jsonl"), tmp_path)) == [
        Prompt("sums/0", "sums", "1+1=", "2", {"level": 1}),
        Prompt("sums/1", "sums", "2+1=", "3", {}),
        Prompt("sums/2", "sums", "0.5+0=", "0.5", {}),
    ]


def test_an_answer_that_looks_like_a_date_stays_text_and_rows_do_not_gain_fields(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"prompt": "a", "answer": "2024-01-01"}, {"prompt": "b", "answer": "x", "k": 1})
    first, second = read_prompts(source("a.jsonl"), tmp_path)
    assert (first.answer, first.metadata) == ("2024-01-01", {})
    assert second.metadata == {"k": 1}


def test_the_text_of_a_whole_number_has_no_fraction(tmp_path: Path) -> None:
    answers = [72.0, -3.0, 0.5, 1e23, 72]
    write_lines(tmp_path / "a.jsonl", *[{"prompt": "a", "answer": answer} for answer in answers])
    assert [prompt.answer for prompt in read_prompts(source("a.jsonl"), tmp_path)] == ["72", "-3", "0.5", "1e+23", "72"]


def test_nan_is_a_missing_answer(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"prompt": "a", "answer": float("nan")})
    [prompt] = read_prompts(source("a.jsonl"), tmp_path)
    assert prompt.answer is None
    with pytest.raises(DataError, match="line 1: answerField 'answer' is null or NaN"):
        read_prompts(source("a.jsonl"), tmp_path, answers_required=True)


def test_lines_that_python_does_not_read_are_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", "[" * 200_000, f'{{"prompt": {"9" * 5000}}}')
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.jsonl"), tmp_path)
    assert raised.value.problems == (
        f"source sums: {tmp_path}/a.jsonl, line 1: not JSON (nested too deeply)",
        f"source sums: {tmp_path}/a.jsonl, line 2: not JSON (an integer has too many digits)",
    )


def test_an_absolute_path_is_not_relative_to_the_manifest(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"prompt": "a"})
    [prompt] = read_prompts(source(str(tmp_path / "a.jsonl")), Path("/elsewhere"))
    assert prompt.answer is None


def test_parquet_rows_hold_messages_and_a_nested_answer(tmp_path: Path) -> None:
    table = {
        "prompt": [[{"role": "user", "content": "1+1?"}], [{"role": "system", "content": "s"}]],
        "reward_model": [{"ground_truth": "2"}, {"ground_truth": "3"}],
    }
    datasets.Dataset.from_dict(table).to_parquet(tmp_path / "train.parquet")
    first, second = read_prompts(source("train.parquet", answerField="reward_model.ground_truth"), tmp_path)
    assert first.text == ({"role": "user", "content": "1+1?"},)
    assert (first.answer, second.answer, second.id) == ("2", "3", "sums/1")


def test_the_format_may_be_set_where_the_extension_is_unknown(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.txt", {"prompt": "a"})
    assert len(read_prompts(source("a.txt", format="JSONLines"), tmp_path)) == 1
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.txt"), tmp_path)
    assert "'.txt' does not determine the format. Set format: JSONLines or Parquet" in problems(raised)


def test_all_problems_of_all_files_are_reported_together(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "a.jsonl",
        '{"prompt": "cut off',
        {"question": "a", "answer": "1"},
        {"question": "b", "answer": "1"},
        {"prompt": 3, "answer": "1"},
        {"prompt": "c", "answer": True},
        "[1, 2]",
        {"prompt": [{"role": "user"}], "answer": "1"},
        {"prompt": "", "answer": "1"},
    )
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.jsonl", "latin.jsonl", "broken.parquet", "folder", "absent.jsonl"), tmp_path)
    text = problems(raised)
    for expected in (
        "a.jsonl, line 1: not JSON (Unterminated string starting at column 12)",
        "a.jsonl, line 2, line 3: promptField 'prompt': no such field. "
        "Set promptField to a field of the row, which has question, answer",
        "a.jsonl, line 4: promptField 'prompt': a text or a list of chat messages is expected, found the number 3",
        "a.jsonl, line 5: answerField 'answer': a text or a number is expected, found the boolean true",
        "a.jsonl, line 6: a JSON object is expected, found a list of 2",
        "a.jsonl, line 7: prompt[0]: a message with the texts role and content is expected, found a mapping with role",
        "a.jsonl, line 8: promptField 'prompt': a text or a list of chat messages is expected, found an empty one",
        "latin.jsonl, line 1: not UTF-8",
        "broken.parquet is not a readable Parquet file: Parquet magic bytes not found",
        "folder is a folder. Name the files in it.",
        "absent.jsonl does not exist.",
        "holds a.jsonl, broken.parquet, latin.jsonl.",
    ):
        assert expected in text
    assert all(problem.startswith("source sums: ") for problem in raised.value.problems)
    assert str(raised.value).startswith(f"{len(raised.value.problems)} problems in the data\n")


@pytest.mark.parametrize("start", ["", "\n", "\ufeff"])
@pytest.mark.parametrize("indent", [0, 2])
def test_a_json_array_over_several_lines_is_one_problem(tmp_path: Path, start: str, indent: int) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    (tmp_path / "a.jsonl").write_text(start + json.dumps(rows, indent=indent))
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.jsonl"), tmp_path)
    reason = "this is a JSON array over several lines. Write one object per line, without the brackets around all."
    assert raised.value.problems == (f"source sums: {tmp_path}/a.jsonl: {reason}",)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_one_problem(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding=encoding)
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.jsonl"), tmp_path)
    reason = "this is UTF-16. Save the file as UTF-8."
    assert raised.value.problems == (f"source sums: {tmp_path}/a.jsonl: {reason}",)


def test_a_thousand_equal_problems_are_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", *[{"question": "a"}] * 1000)
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.jsonl"), tmp_path)
    [problem] = raised.value.problems
    assert "line 1, line 2, line 3 and 997 more: promptField 'prompt': no such field" in problem


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", "")
    with pytest.raises(DataError, match=r"a\.jsonl: no rows\. Add at least one"):
        read_prompts(source("a.jsonl"), tmp_path)


def test_answers_are_required_only_where_a_reward_needs_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b", "answer": None})
    assert [prompt.answer for prompt in read_prompts(source("a.jsonl"), tmp_path)] == [None, None]
    with pytest.raises(DataError) as raised:
        read_prompts(source("a.jsonl"), tmp_path, answers_required=True)
    assert (
        "line 1: answerField 'answer': no such field. Set answerField to a field of the row, which has prompt"
        in problems(raised)
    )
    assert "line 2: answerField 'answer' is null" in problems(raised)


def test_a_claim_outside_a_cluster_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the volume 'sets' is mounted only in a cluster"):
        read_prompts(source("a.jsonl", volume={"persistentVolumeClaim": {"claimName": "sets"}}), tmp_path)
