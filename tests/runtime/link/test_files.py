import asyncio
import json

import pytest

from qwen35_trainer.contract import Control, parse_progress
from qwen35_trainer.runtime.folder import write_whole
from qwen35_trainer.runtime.link.base import LinkDown, LinkRefused
from qwen35_trainer.runtime.link.files import FileLink
from tests.patience import PATIENCE


async def test_a_report_replaces_the_one_before_whole(tmp_path, report):
    link = FileLink(tmp_path / "link")
    await link.report(report)
    await link.report(later := report.model_copy(update={"update": 8}))
    assert parse_progress((tmp_path / "link" / "progress.json").read_text()) == later
    assert [path.name for path in (tmp_path / "link").iterdir()] == ["progress.json"]


async def test_a_folder_that_vanished_is_a_link_that_is_down(tmp_path, report):
    link = FileLink(tmp_path / "link")
    (tmp_path / "link").rmdir()
    with pytest.raises(LinkDown, match=r"progress\.json was not written: No such file"):
        await link.report(report)


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "link").write_text("mine")
    with pytest.raises(LinkRefused, match="name a folder, or cluster"):
        FileLink(tmp_path / "link")


async def test_orders_are_brought_as_they_change_and_garbage_is_passed_over(tmp_path):
    file = tmp_path / "control.json"
    orders = FileLink(tmp_path).orders()
    waiting = asyncio.create_task(anext(orders))
    await asyncio.sleep(0)
    for text in (Control(attempt=1).text(), "{", json.dumps({"attempt": 2, "unknown": 1})):
        write_whole(file, text)
        if text != "{":
            brought = await asyncio.wait_for(waiting, PATIENCE)
            assert brought.attempt == json.loads(text)["attempt"]
            waiting = asyncio.create_task(anext(orders))
        else:
            await asyncio.sleep(0.8)  # long enough to be looked at
            assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
