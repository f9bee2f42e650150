"""The journal: what a crash leaves to go on from, so that each prompt of the epoch trains exactly once.

    98f01502 {"v":1,"b":8,"p":21,"w":[19,20],"g":23,"h":[21,22]}   Base: batch 8 is next, prompts 19 and 20 are due
    be0686e4 {"d":23,"p":21}                                       Dispatched: group 23, of prompt 21
    005fd3d2 {"l":22,"p":20,"r":"filtered"}                        Left: group 22, untrained
    7f68b0e1 {"t":8,"v":4,"g":[21,23]}                             Train: batch 8, before the train pool is asked

A line begins with the CRC-32 of the rest of it; lines come in the order of the coordinator's actions. Weights that have
trained the batches before b go on from where batch b was taken: what followed belongs to weights that are gone.

A crash while a line is written leaves a torn tail, which is cut: nothing after that line was done. A line that cannot
be read before one that can is damage, and so is a record that cannot follow the others: `JournalDamaged` says what it
touches.

Functions of bytes; the file is `runtime/journal_file.py`. See docs/design/journal.md.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from qwen35_trainer.pipeline.actions import Dispatched, Left, Reason, Train
from qwen35_trainer.pipeline.replay import Damage, Extent, JournalDamaged, Replay
from qwen35_trainer.pipeline.snapshot import Snapshot

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Base:
    """The first record: the journal goes on from here."""

    snapshot: Snapshot
    held: tuple[int, ...] = ()
    """Groups that later records may name: their prompts are the first of `snapshot.pending`, in this order."""
    attempt: str = ""
    """Whose journal it is: a checkpoint of another attempt has another history, even at the same batch."""


type Record = Base | Dispatched | Left | Train

JOURNALLED = (Dispatched, Left, Train)
"""The coordinator's actions that are records."""


def encode(record: Record) -> bytes:
    """One line, with its newline."""
    text = json.dumps(_fields(record), separators=(",", ":")).encode()
    return b"%s %s\n" % (_checksum(text), text)


def recover(data: bytes, batch: int) -> Snapshot:
    """Where to go on with weights that have trained all batches before `batch`.

    The snapshot before batch `batch` was taken, or after all records when it was not. Damage behind that point does not
    matter. Raises JournalDamaged.
    """
    return _replay(_read(data), batch)[0].snapshot


def origin(data: bytes) -> Base | None:
    """The first record; None when there is none that can be read."""
    lines = _read(data)
    return lines[0][1] if lines and isinstance(lines[0][1], Base) else None


def compact(data: bytes, batch: int) -> bytes:
    """A journal that begins before batch `batch` was taken, and tells the same as `data` from there on.

    Raises JournalDamaged.
    """
    lines = _read(data)
    replay, done = _replay(lines, batch)
    rest = b"".join(line + b"\n" for line, _ in lines[done:])
    first = lines[0][1]
    assert isinstance(first, Base), "what can be replayed has a base"
    return encode(Base(replay.snapshot, replay.held, first.attempt)) + rest


def _fields(record: Record) -> dict[str, object]:
    match record:
        case Base(start, held, attempt):
            pending, names = list(start.pending), list(held)
            place = {"v": FORMAT, "b": start.batch, "p": start.position, "w": pending, "g": start.group, "h": names}
            return place | ({"a": attempt} if attempt else {})
        case Dispatched(group, position):
            return {"d": group, "p": position}
        case Left(group, position, reason):
            return {"l": group, "p": position, "r": reason.value}
        case Train(batch, version, groups):
            return {"t": batch, "v": version, "g": list(groups)}


def _decode(line: bytes) -> Record | None:
    """What `encode` made, its newline taken off; None when it did not."""
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text):
        return None
    try:
        return _record(json.loads(text))
    except ValueError:
        return None


def _record(fields: object) -> Record | None:
    match fields:
        case {"d": int(group), "p": int(position)}:
            return Dispatched(group, position)
        case {"l": int(group), "p": int(position), "r": str(reason)}:
            return Left(group, position, Reason(reason))
        case {"t": int(batch), "v": int(version), "g": [*groups]}:
            return Train(batch, version, tuple(groups))
        case {"v": version} if version != FORMAT:
            raise JournalDamaged([Damage(1, 1, f"format {version}, and this release reads {FORMAT}")])
        case {"b": int(batch), "p": int(position), "w": [*pending], "g": int(group), "h": [*held], **rest}:
            return Base(Snapshot(batch, position, tuple(pending), group), tuple(held), str(rest.get("a", "")))
        case _:
            return None


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _read(data: bytes) -> list[tuple[bytes, Record | None]]:
    """Every line with what it says, without the torn tail."""
    lines = [(line, _decode(line)) for line in data.split(b"\n")[:-1]]
    while lines and lines[-1][1] is None:
        lines.pop()
    return lines


def _replay(lines: list[tuple[bytes, Record | None]], batch: int) -> tuple[Replay, int]:
    """The state before `batch` was taken, and how many lines that is. Raises JournalDamaged."""
    replay = _begin(lines, batch)
    for done, (_, record) in enumerate(lines[1:], 1):
        match record:
            case None:
                replay.lost(done + 1, "cannot be read")
            case Base():
                replay.lost(done + 1, "a second base record")
            case Train() if record.batch == batch and not replay.damaged:
                return replay, done
            case _:
                replay.apply(done + 1, record)
    replay.ends(len(lines) + 1, batch)
    if replay.damaged:
        raise JournalDamaged(replay.damages())
    return replay, len(lines)


def _begin(lines: list[tuple[bytes, Record | None]], batch: int) -> Replay:
    base = lines[0][1] if lines else None
    if not isinstance(base, Base):
        lost = [number for number, (_, record) in enumerate(lines, 1) if record is None and number > 1]
        everything = Extent(onwards=0)
        raise JournalDamaged(
            [
                Damage(1, 1, "no base record, which all others build on", everything, everything, everything),
                *(Damage(number, number, "cannot be read", everything, everything, everything) for number in lost),
            ]
        )
    if batch < base.snapshot.batch:
        what = f"the journal begins at batch {base.snapshot.batch}, and the weights have trained {batch} batches"
        raise JournalDamaged([Damage(1, 1, what)])
    return Replay(base.snapshot, base.held)
