"""Carries out the command `qwen35 compare`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from qwen35_trainer.comparison.comparison import ComparisonRefused, compare, comparison_json
from qwen35_trainer.comparison.comparison_table import comparison_table


def print_comparison(folders: Sequence[Path], output: Path | None, *, as_json: bool) -> None:
    """Print a comparison of the runs in `folders`, and write it as an HTML page if `output` is given.

    output: path of the page; None: no page is written. as_json: print JSON instead of tables. Raises ComparisonRefused
    if the runs cannot be compared, or the page cannot be written.
    """
    if output is not None and output.is_dir():
        raise ComparisonRefused(f"--output {output}: is a folder; name a file in it")
    comparison = compare(folders)
    if output is not None:
        from qwen35_trainer.comparison.comparison_page import write_comparison

        try:
            write_comparison(output, comparison)
        except OSError as error:
            raise ComparisonRefused(
                f"--output {output}: cannot be written: {error.strerror}; name another file"
            ) from error
        except ImportError as error:
            raise ComparisonRefused(f"a page needs {error.name}. Install it: pip install 'qwen35[trainer]'") from error
    if as_json:
        sys.stdout.write(f"{json.dumps(comparison_json(comparison), indent=2, ensure_ascii=False, allow_nan=False)}\n")
        return
    console = Console()
    console.print(comparison_table(comparison))
    if output is not None:
        console.print(f"Page: {output}", soft_wrap=True, markup=False, highlight=False)
