"""Writes the prompts of tiny-grpo.yaml and tiny-sft.yaml: find the digit behind the mark.

    3>81047=   →   8

Training and held-out prompts never share a row. Run it to make them again: python examples/tiny/generate.py
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DIGITS, TRAIN, HELD_OUT = 6, 4800, 64


def prompt(generator: random.Random) -> tuple[str, str]:
    digits = [generator.choice("0123456789") for _ in range(DIGITS)]
    mark = generator.randrange(DIGITS)
    return "".join(digits[:mark]) + ">" + "".join(digits[mark:]) + "=", digits[mark]


def main() -> None:
    generator = random.Random(35)  # noqa: S311  # data, not secrets
    rows: dict[str, str] = {}
    while len(rows) < TRAIN + HELD_OUT:
        question, answer = prompt(generator)
        rows[question] = answer
    pairs = list(rows.items())
    folder = Path(__file__).parent
    for name, part in (("validation", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        lines = (json.dumps({"prompt": question, "answer": answer}) for question, answer in part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
