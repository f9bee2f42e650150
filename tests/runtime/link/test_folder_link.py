import asyncio
import json

import pytest

from qwen35_trainer.atomic_files import write_atomically
from qwen35_trainer.contract import Control, parse_progress
from qwen35_trainer.runtime.link.operator_link import FolderLink, LinkDown, LinkRefused
from tests.patience import PATIENCE


async def test_a_report_replaces_the_one_before_whole(tmp_path, report):
    link = FolderLink(tmp_path / "link")
    await link.report(report)
    await link.report(later := report.model_copy(update={"update": 8}))
    assert parse_progress((tmp_path / "link" / "progress.json").read_text()) == later
    assert [path.name for path in (tmp_path / "link").iterdir()] == ["progress.json"]


async def test_a_folder_that_vanished_is_a_link_that_is_down(tmp_path, report):
    link = FolderLink(tmp_path / "link")
    (tmp_path / "link").rmdir()
    with pytest.raises(LinkDown, match=r"progress\.json was not written: No such file"):
        await link.report(report)


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "link").write_text("mine")
    with pytest.raises(LinkRefused, match="name a folder, or cluster"):
        FolderLink(tmp_path / "link")


async def test_orders_are_brought_as_they_change_and_garbage_is_passed_over(tmp_path, caplog):
    """Each garbage text is replaced only after it was logged."""
    file = tmp_path / "control.json"
    orders = FolderLink(tmp_path).orders()
    garbage = ["{", "[1]", '{"attempt": "first"}']
    waiting = asyncio.create_task(anext(orders))
    await asyncio.sleep(0)
    write_atomically(file, Control(attempt=1).text())
    assert (await asyncio.wait_for(waiting, PATIENCE)).attempt == 1
    waiting = asyncio.create_task(anext(orders))
    for logged, text in enumerate(garbage, 1):
        write_atomically(file, text)
        async with asyncio.timeout(PATIENCE):
            while caplog.text.count("the previous orders stay in force") < logged:  # noqa: ASYNC110  # there is no event
                await asyncio.sleep(0.02)
    write_atomically(file, json.dumps({"attempt": 2, "unknown": 1}))
    assert (await asyncio.wait_for(waiting, PATIENCE)).attempt == 2
    assert caplog.text.count("the previous orders stay in force") == len(garbage)
