"""One mistake in one file, as data."""

from dataclasses import dataclass


class DoesNotApply(Exception):
    """The file does not contain the text to replace, or contains it more than once."""


@dataclass(frozen=True)
class Mutant:
    """A mistake that changes what the product does, and the test that must notice it."""

    name: str
    """A sentence that says what is broken."""
    file: str
    """The product file, from the repository's root."""
    old: str
    """The correct text. It occurs exactly once in the file."""
    new: str
    """The mistake that replaces it."""
    killer: str
    """Node id of a test that passes without the mistake and fails with it."""
    folders: tuple[str, ...]
    """Test folders that import the package of `file`, cheapest first."""

    @property
    def package(self) -> str:
        """The product package that contains `file`: "pipeline"."""
        return self.file.split("/")[2]

    def applied_to(self, text: str) -> str:
        """The file's text with the mistake in it. Raises DoesNotApply."""
        count = text.count(self.old)
        if count != 1:
            raise DoesNotApply(f"{self.file} contains the text to replace {count} times")
        return text.replace(self.old, self.new)
