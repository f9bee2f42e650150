"""Writes the data of the tiny examples: python examples/tiny/generate.py

    train, validation           tiny-grpo.yaml, tiny-sft.yaml: the digit behind the mark          3>81047=  →  8
    tools-train, -validation    tiny-sft-tools.yaml: a sum, computed by a tool                    3+4  →  add(3, 4)  →  7
    images-train, -validation   tiny-sft-vision.yaml, tiny-grpo-vision.yaml: the bright quarter   ▝  →  2

Training and held-out rows are disjoint.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
DIGITS, TRAIN, HELD_OUT = 6, 4800, 64
SUMS_HELD_OUT = 20
SIDE = 16
LEVELS = (140, 180, 220, 255)


def digits_behind_marks(generator: random.Random) -> Iterable[tuple[str, dict[str, object]]]:
    rows: dict[str, str] = {}
    while len(rows) < TRAIN + HELD_OUT:
        digits = [generator.choice("0123456789") for _ in range(DIGITS)]
        mark = generator.randrange(DIGITS)
        rows["".join(digits[:mark]) + ">" + "".join(digits[mark:]) + "="] = digits[mark]
    for number, (question, answer) in enumerate(rows.items()):
        yield "validation" if number < HELD_OUT else "train", {"prompt": question, "answer": answer}


def sums(generator: random.Random) -> Iterable[tuple[str, dict[str, object]]]:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    generator.shuffle(pairs)
    for number, (a, b) in enumerate(pairs):
        call = {"function": {"name": "add", "arguments": {"a": a, "b": b}}}
        messages = [
            {"role": "user", "content": f"{a}+{b}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ]
        part = "tools-validation" if number < SUMS_HELD_OUT else "tools-train"
        yield part, {"prompt": messages, "tools": [{"name": "add"}]}


def bright_quarters() -> Iterable[tuple[str, dict[str, object]]]:
    for level in LEVELS:
        for quarter in range(4):
            name = f"images/{quarter + 1}-{level}.png"
            (FOLDER / name).write_bytes(png(quarter, level))
            part = "images-validation" if level == LEVELS[1] else "images-train"
            yield part, {"prompt": "<image>where?", "images": [name], "answer": str(quarter + 1)}


def png(quarter: int, level: int) -> bytes:
    """Draw a grey square with one bright quarter. It is not compressed, so that the bytes are the same everywhere."""
    half = SIDE // 2
    rows = [
        b"\0" + bytes(level if (row // half, column // half) == divmod(quarter, 2) else 40 for column in range(SIDE))
        for row in range(SIDE)
    ]
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), level=0)), (b"IEND", b""))
    written = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + written


def main() -> None:
    (FOLDER / "images").mkdir(exist_ok=True)
    files: dict[str, list[str]] = {}
    for rows in (digits_behind_marks(random.Random(35)), sums(random.Random(35)), bright_quarters()):  # noqa: S311  # data, not secrets
        for name, row in rows:
            files.setdefault(name, []).append(json.dumps(row))
    for name, lines in files.items():
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
