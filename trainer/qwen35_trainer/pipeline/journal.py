"""The journal: a write-ahead log from which a run continues after a crash.

With the journal, each prompt of an epoch is used exactly once, even after a crash: its group trains, fails or is
filtered.

    98f01502 {"v":1,"b":8,"p":21,"w":[19,20],"g":23,"h":[21,22]}   JournalBase: batch 8 is next, prompts 19 and 20 are pending
    be0686e4 {"d":23,"p":21}                                       GroupDispatched: group 23, of prompt 21
    005fd3d2 {"l":22,"p":20,"r":"filtered"}                        GroupLeft: group 22, untrained
    7f68b0e1 {"t":8,"v":4,"g":[21,23]}                             TrainGroups: batch 8, written before it trains

Each line begins with the CRC-32 of its JSON text. Lines are in the order of the coordinator's actions. If the
weights of a run were trained with exactly the batches before b, the run continues from the scheduling state just before
batch b was taken. Later records are ignored, because the weights that they led to are lost.

A crash while a line is written leaves an incomplete last line, which is cut off. The action of that line was not yet
carried out. An unreadable line before a readable one is damage, and so is a record that cannot follow earlier records.
`JournalDamaged` names the first damaged line.

All functions take and return bytes; `runtime/journal_file.py` reads and writes the file. See docs/design/journal.md.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

from qwen35_trainer.pipeline.commands import SchedulingSnapshot, TrainGroups
from qwen35_trainer.pipeline.notices import GroupDispatched, GroupLeft, LeaveReason
from qwen35_trainer.pipeline.replay import JournalDamaged, Replay

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalBase:
    """The first record of a journal: the scheduling state that the other records start from."""

    snapshot: SchedulingSnapshot
    held: tuple[int, ...] = ()
    """Groups that were in the pipeline, to which later records may refer.

    The prompts of these groups come first in `snapshot.pending`, in the same order.
    """
    attempt: str = ""
    """Name of the attempt that wrote the journal; empty if unknown.

    The journal fits only checkpoints of this attempt, because another attempt may have dispatched other groups before
    the same batch.
    """


type JournalRecord = JournalBase | GroupDispatched | GroupLeft | TrainGroups

JOURNALLED_ACTIONS = (GroupDispatched, GroupLeft, TrainGroups)
"""The coordinator's actions that the journal records."""


def encode(record: JournalRecord) -> bytes:
    """Encode a record of the journal as one line, with its newline."""
    text = json.dumps(_fields(record), separators=(",", ":")).encode()
    return b"%s %s\n" % (_checksum(text), text)


def recover(data: bytes, batch: int) -> SchedulingSnapshot:
    """Return the scheduling state for a run whose weights were trained with exactly the batches before `batch`.

    data: contents of the journal. The result is the state before batch `batch` was taken, or the state after all
    records if the journal does not contain that batch. Raises JournalDamaged if a record up to this point is damaged or
    missing, or if the journal begins after `batch`. Damage in later records does not matter.
    """
    return _replay(_read(data), batch)[0].snapshot


def origin(data: bytes) -> JournalBase | None:
    """Return the base record of a journal, or None if the journal is empty or its first record is damaged.

    data: contents of the journal. Raises JournalDamaged if the base record has the format of another release.
    """
    lines = _read(data)
    return lines[0][1] if lines and isinstance(lines[0][1], JournalBase) else None


def compact(data: bytes, batch: int) -> bytes:
    """Return a shorter journal, in which one base record replaces all records that precede batch `batch`.

    data: contents of the journal. Recovery for `batch` or a later batch gives the same result from both journals.
    Raises JournalDamaged if one of the replaced records is damaged or missing.
    """
    lines = _read(data)
    replay, replayed = _replay(lines, batch)
    later_lines = b"".join(line + b"\n" for line, _ in lines[replayed:])
    first = lines[0][1]
    assert isinstance(first, JournalBase), "a journal that can be replayed has a base"
    return encode(JournalBase(replay.snapshot, replay.held, first.attempt)) + later_lines


def _fields(record: JournalRecord) -> dict[str, object]:
    match record:
        case JournalBase(start, held, attempt):
            fields: dict[str, object] = {"v": FORMAT_VERSION, "b": start.batch, "p": start.position}
            fields |= {"w": list(start.pending), "g": start.group, "h": list(held)}
            return fields | ({"a": attempt} if attempt else {})
        case GroupDispatched(group, position):
            return {"d": group, "p": position}
        case GroupLeft(group, position, reason):
            return {"l": group, "p": position, "r": reason.value}
        case TrainGroups(batch, version, groups):
            return {"t": batch, "v": version, "g": list(groups)}


def _decode(line: bytes) -> JournalRecord | None:
    """Decode a line, given without its newline. Returns None if the checksum or the fields of the line are wrong.

    Raises JournalDamaged if the line is a base record in the format of another release.
    """
    checksum, _, text = line.partition(b" ")
    if checksum != _checksum(text):
        return None
    try:
        return _record(json.loads(text))
    except ValueError:
        return None


def _record(fields: object) -> JournalRecord | None:
    match fields:
        case {"d": int(group), "p": int(position)}:
            return GroupDispatched(group, position)
        case {"l": int(group), "p": int(position), "r": str(reason)}:
            return GroupLeft(group, position, LeaveReason(reason))
        case {"t": int(batch), "v": int(version), "g": [*groups]}:
            return TrainGroups(batch, version, tuple(groups))
        case {"v": version} if version != FORMAT_VERSION:
            raise JournalDamaged(1, f"it has format {version}, and this release reads {FORMAT_VERSION}")
        case {"b": int(batch), "p": int(position), "w": [*pending], "g": int(group), "h": [*held], **rest}:
            return JournalBase(
                SchedulingSnapshot(batch, position, tuple(pending), group), tuple(held), str(rest.get("a", ""))
            )
        case _:
            return None


def _checksum(text: bytes) -> bytes:
    return b"%08x" % zlib.crc32(text)


def _read(data: bytes) -> list[tuple[bytes, JournalRecord | None]]:
    """Return each line of a journal, without its newline, together with its record, or None if it is unreadable.

    Unreadable lines at the end are left out, because a crash may have interrupted the write.
    """
    lines = [(line, _decode(line)) for line in data.split(b"\n")[:-1]]
    while lines and lines[-1][1] is None:
        lines.pop()
    return lines


def _replay(lines: list[tuple[bytes, JournalRecord | None]], batch: int) -> tuple[Replay, int]:
    """Return the scheduling state before `batch` was taken, and the number of lines up to that point.

    If the journal does not contain that batch, return the state after all records, and the number of all lines. Raises
    JournalDamaged if a line up to that point is unreadable, or contradicts the lines before it.
    """
    replay = _begin(lines, batch)
    for replayed, (_, record) in enumerate(lines[1:], 1):
        match record:
            case None:
                raise JournalDamaged(replayed + 1, "it cannot be read")
            case JournalBase():
                raise JournalDamaged(replayed + 1, "a second base record")
            case TrainGroups() if record.batch == batch:
                return replay, replayed
            case _:
                replay.apply(replayed + 1, record)
    reached = replay.snapshot.batch
    if reached < batch:
        raise JournalDamaged(
            len(lines) + 1, f"it ends before batch {reached}, and the weights have trained {batch} batches"
        )
    return replay, len(lines)


def _begin(lines: list[tuple[bytes, JournalRecord | None]], batch: int) -> Replay:
    base = lines[0][1] if lines else None
    if not isinstance(base, JournalBase):
        raise JournalDamaged(1, "no base record, which all others build on")
    if batch < base.snapshot.batch:
        raise JournalDamaged(
            1, f"it begins at batch {base.snapshot.batch}, and the weights have trained {batch} batches"
        )
    return Replay(base.snapshot, base.held)
