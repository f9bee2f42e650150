"""The repository's root."""

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[1]
