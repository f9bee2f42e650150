"""The lint of names and prose: what it rejects, and what it lets pass."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tools.language import __main__ as command
from tools.language import baseline
from tools.language.first_sentence import fragments_in, problem_of
from tools.language.names import adjectives_in, collisions, pronouns_in
from tools.language.phrases import phrases_in
from tools.language.texts import Text, texts_of


def _phrases(content: str) -> list[str]:
    return [message.split('"')[1] for _, message in phrases_in(Text(1, content))]


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ("The value is no number.", "is no"),
        ("The file is written anew.", "anew"),
        ("All problems at once.", "at once"),
        ("It waits beside\nthe queue.", "beside"),
        ("The greatest lag of a token.", "greatest"),
        ("The least time between two tries.", "least"),
        ("Goes on with the next batch.", "Goes on"),
        ("What becomes of the sample.", "becomes of"),
        ("It ends by itself.", "by itself"),
        ("The seconds are the user's to set.", "user's to set"),
        ("The name of the run's own.", "run's own"),
        ("Sought is the best plan.", "Sought is"),
        ("Who waits here is woken.", "Who waits here is woken."),
        ("Nobody is told.", "told"),
    ],
)
def test_a_phrase_to_avoid_is_reported(content, phrase):
    assert _phrases(content) == [phrase]


@pytest.mark.parametrize(
    "content",
    [
        "There is no record.",
        "It is no longer used.",
        "At least two ranks.",
        "Worked out by hand.",
        "The left-hand side.",
        "The least common multiple, the greatest common divisor.",
        "The rewards are all the same.",
        "The state is set aside.",
        "A process that runs on its own.",
    ],
)
def test_standard_english_passes(content):
    assert _phrases(content) == []


def test_a_phrase_is_reported_on_its_line():
    text = Text(10, "First line.\nSecond line.\nThe third is written\nanew.")
    assert [line for line, _ in phrases_in(text)] == [13]


def test_prose_is_found_in_docstrings_comments_messages_and_names_of_tests():
    source = '''
"""Docstring of a module."""
# First line of a comment,
# and its second.
raise ValueError(f"the value {value} is wrong")
def test_a_name_that_reads_as_a_sentence(): ...
code = "word"
'''
    found_texts = {text.content for text in texts_of(source, ".py", ast.parse(source))}
    assert found_texts == {
        "Docstring of a module.",
        "First line of a comment,\nand its second.",
        "the value ` is wrong",
        "a name that reads as a sentence",
    }


def test_code_in_documents_is_not_prose():
    source = "Use `tell at once` here.\n\n```\ntold anew\n```\nThe end, anew."
    (text,) = texts_of(source, ".md", None)
    assert [line for line, _ in phrases_in(text)] == [6]


def test_comments_of_shell_scripts_and_yaml_are_prose():
    (text,) = texts_of("a: 1  # Written anew.\n", ".yaml", None)
    assert _phrases(text.content) == ["anew"]


@pytest.mark.parametrize(
    "sentence",
    [
        "Return the advantage of each sample.",
        "Whether both differences are within the limits.",
        "The loop ends when its queue is empty.",
        "Seconds to prefill `tokens` tokens.",
        "Read and check the manifest.",
        "Context manager: open a connection.",
    ],
)
def test_a_sentence_with_a_verb_documents_a_function(sentence):
    assert problem_of(sentence, noun_phrase_allowed=False) is None


@pytest.mark.parametrize(
    ("fragment", "problem"),
    [
        ("Of the whole group.", "starts with"),
        ("The gradients.", "is a fragment"),
        ("Weight of the longer lengths.", "has no verb"),
        ("What there is to show.", "starts with"),
        ("Context manager: of the whole group.", "starts with"),
    ],
)
def test_a_fragment_does_not_document_a_function(fragment, problem):
    assert problem in str(problem_of(fragment, noun_phrase_allowed=False))


def test_only_public_docstrings_of_modules_classes_functions_and_methods_are_checked():
    source = '''
class Record:
    """Metadata of one checkpoint."""
    @property
    def name(self):
        """Name of the folder."""
    def load(self):
        """Of the folder."""
    def _load(self):
        """Of the folder."""
def load():
    def inner():
        """Of the folder."""
'''
    assert [line for line, _ in fragments_in(ast.parse(source))] == [8]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("for one in items: pass", 1),
        ("def load(given): pass", 1),
        ("self.told = 3", 1),
        ("left = deadline - now", 1),
        ("left, right = sides", 0),
        ("from hypothesis import given", 0),
    ],
)
def test_a_variable_is_named_after_a_thing(source, count):
    assert len(list(pronouns_in(ast.parse(source)))) == count


@pytest.mark.parametrize(
    ("source", "count"),
    [("LONGEST = 63", 1), ("LONGEST_WAIT: float = 10.0", 1), ("_KEPT = 5", 1), ("MAX_WAIT_SECONDS = 10.0", 0)],
)
def test_a_constant_is_named_by_a_noun(source, count):
    assert len(list(adjectives_in(ast.parse(source)))) == count


def test_two_modules_do_not_define_classes_or_types_of_one_name():
    trees = {
        Path("a.py"): ast.parse("class Record: ...\nclass _Group: ...\nRows = list[int]\ntype Count = int"),
        Path("b.py"): ast.parse("class Record: ...\nclass _Group: ...\ntype Rows = list[int]\nclass Counts: ..."),
    }
    assert {message for _, _, message in collisions(trees)} == {
        f"class {name} is also defined in {path}" for name in ("Record", "Rows") for path in ("a.py", "b.py")
    }


@pytest.fixture
def allowed(tmp_path, monkeypatch):
    """A baseline that allows two phrases in one file."""
    monkeypatch.setattr(baseline, "PATH", tmp_path / "baseline.txt")
    counts = Counter({("a.py", "phrase"): 2})
    baseline.save(counts)
    return counts


def _violations(path: str, count: int) -> list[command.Violation]:
    return [command.Violation(path, line, "phrase", "text") for line in range(count)]


@pytest.mark.parametrize(("path", "count", "code"), [("a.py", 2, 0), ("a.py", 1, 0), ("a.py", 3, 1), ("b.py", 1, 1)])
def test_a_file_has_at_most_as_many_violations_as_the_baseline_allows(allowed, capsys, path, count, code):
    assert command.compare(_violations(path, count)) == code


def test_the_baseline_follows_renamed_files_and_may_only_shrink(allowed, capsys):
    assert command.record(Counter({("b.py", "phrase"): 3})) == 1
    assert baseline.load() == allowed
    assert command.record(Counter({("b.py", "phrase"): 2})) == 0
    assert command.record(Counter({("b.py", "phrase"): 1})) == 0
    assert baseline.load() == Counter({("b.py", "phrase"): 1})
