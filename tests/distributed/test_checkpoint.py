"""Checkpoints of one number of ranks on another, and of a group that was killed while it wrote one."""

import contextlib
from pathlib import Path

import pytest
import torch

from tests.distributed.group import Group
from tests.distributed.samples import batch_of, spec_of

LORA = {"lora": {"rank": 4, "targets": ["q_proj", "in_proj_qkv", "down_proj"]}}
FIRST, SECOND = (batch_of(8, seed, supervised=True) for seed in (0, 1))


def run(groups, ranks: int, batches, **arguments):
    train = arguments.pop("train", {})
    spec = spec_of(ranks, **train)
    return groups(ranks).run("train", spec=spec, batches=batches, rates=[1e-3] * len(batches), **arguments)[0]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("train", [{}, {"optimizer": {"type": "Muon"}}, LORA], ids=["AdamW", "Muon", "LoRA"])
def test_a_checkpoint_of_four_ranks_loads_on_two_and_on_one_bit_by_bit(groups, tmp_path: Path, train) -> None:
    folders = [tmp_path / str(ranks) for ranks in (4, 2, 1)]
    for folder in folders:
        folder.mkdir()
    base = 0 if "lora" in train else 5  # adapters go with the model that they were made for; else all is in the file
    saved = run(groups, 4, [FIRST], save=folders[0], train=dict(train))
    on_two = run(groups, 2, [], seed=base, restore=folders[0], save=folders[1], train=dict(train))
    on_one = run(groups, 1, [], seed=base, restore=folders[1], save=folders[2], train=dict(train))
    assert same(on_two["weights"], saved["weights"])
    assert same(on_one["weights"], saved["weights"])
    # The optimizer's state came along too.
    [expected] = run(groups, 1, [SECOND], seed=base, restore=folders[0], train=dict(train))["metrics"]
    [actual] = run(groups, 1, [SECOND], seed=base, restore=folders[2], train=dict(train))["metrics"]
    assert actual == expected


def test_a_checkpoint_of_adapters_holds_nothing_else(groups, tmp_path: Path) -> None:
    sizes = {}
    for name, train in (("whole", {}), ("adapters", LORA)):
        folder = tmp_path / name
        folder.mkdir()
        run(groups, 1, [FIRST], save=folder, train=dict(train))
        sizes[name] = sum(file.stat().st_size for file in (folder / "state").glob("*.distcp"))
    assert sizes["adapters"] < sizes["whole"] / 3


def test_a_group_killed_in_the_middle_of_a_save_resumes_from_the_checkpoint_before(groups, tmp_path: Path) -> None:
    """The kernel kills both ranks at the byte that passes their limit (SIGXFSZ), halfway through the second save."""
    spec, batches = spec_of(2), [FIRST, SECOND]
    whole = groups(2).run("train", spec=spec, batches=batches, rates=[1e-3, 1e-3])[0]["metrics"]
    doomed = Group(2)
    with contextlib.closing(contextlib.ExitStack()) as ending:
        ending.callback(doomed.stop)
        with pytest.raises(AssertionError, match=r"the process ended \(SIGXFSZ\)"):
            doomed.run("die_in_the_middle_of_a_save", spec=spec, batches=batches, store=tmp_path, bytes_allowed=40_000)
    partial = tmp_path / ".update-000002.partial"
    assert [file.stat().st_size for file in partial.rglob("*") if file.stat().st_size == 40_000]
    resumed = groups(2).run("go_on", spec=spec, batches=batches, store=tmp_path)[0]
    assert resumed["from"] == "update-000001"
    assert resumed["metrics"] == whole[1:]
