"""What `make soak` runs."""

from pathlib import Path

from tests import soak

TESTS = Path(soak.__file__).parent


def test_every_folder_of_tests_is_in_some_kind() -> None:
    folders = {file.relative_to(TESTS).parts[0] for file in TESTS.rglob("test_*.py")}
    assert folders == {place.split("/")[0] for kind in soak.kinds() for place in kind.tests}


def test_what_is_deselected_exists_and_is_a_kind_of_its_own() -> None:
    left_out = [word for kind in soak.kinds() for word in kind.arguments if word.startswith("--deselect=")]
    assert len(left_out) == 2
    for word in left_out:
        file, name = word.removeprefix("--deselect=tests/").split("::")
        assert f"def {name}(" in (TESTS / file).read_text()
        assert (file,) in [kind.tests for kind in soak.kinds()]


def test_each_kind_gives_pytest_places_that_exist_and_its_seed() -> None:
    for kind in soak.kinds():
        assert all((TESTS / place).exists() for place in kind.tests), kind.name
        assert "--hypothesis-seed=7" in kind.command(7)
