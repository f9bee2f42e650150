"""The check of links between documents finds what is broken."""

import pytest

from tools.links import ROOT, anchors, broken_links, missing_sources, pages, tracked_files, unlisted_pages


def test_every_link_of_the_documents_resolves():
    files = tracked_files(ROOT)
    assert [problem for page in pages(ROOT) for problem in (*broken_links(page), *missing_sources(page, files))] == []


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("`runtime/loop.py`", 0),
        ("`trainer/runtime/loop.py`", 0),
        ("`rewards.py`", 0),
        ("`other/loop.py`", 1),
        ("`time/loop.py`", 1),
        ("```\n`other/loop.py`\n```", 0),
    ],
)
def test_a_path_in_backticks_names_the_end_of_a_path(tmp_path, text, problems):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(list(missing_sources(page, ["trainer/runtime/loop.py"]))) == problems


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](other.md)", None),
        ("[a](other.md#two-words)", None),
        ("[a](#here)", None),
        ("[a](https://example.com/missing.md)", None),
        ("`[a](missing.md)`", None),
        ("```\n[a](missing.md)\n```", None),
        ("[a](missing.md)", "the file does not exist"),
        ("![a](missing.png)", "the file does not exist"),
        ("[a](other.md#three-words)", "no such heading"),
        ("[a]: other.md#three-words", "no such heading"),
    ],
)
def test_a_broken_link_is_reported_with_its_line(tmp_path, link, problem):
    (tmp_path / "other.md").write_text("# Two words\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n{link}\n")
    problems = list(broken_links(page))
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert f"{page}:3: " in problems[0]
        assert problem in problems[0]


def test_the_navigation_lists_every_page(tmp_path):
    assert unlisted_pages(ROOT / "docs") == []
    (tmp_path / "howto").mkdir()
    (tmp_path / "index.md").write_text("* [A](a.md)\n")
    for name in ("a.md", "howto/b.md"):
        (tmp_path / name).write_text("# A page\n")
    assert unlisted_pages(tmp_path) == [f"{tmp_path / 'howto' / 'b.md'}: index.md does not list this page"]


def test_anchors_are_those_of_github():
    assert anchors("# A `code` & more: 1.5?\n## Twice\n## Twice\n```\n# no heading\n```\n") == {
        "a-code--more-15",
        "twice",
        "twice-1",
    }
