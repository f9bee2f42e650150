"""The drivers and the dashboards that benchmarks/operator_clusters.py plays."""

import time

from aiohttp.test_utils import TestClient, TestServer

from benchmarks.ray_dashboards import READY_PATH, dashboards
from benchmarks.reporting_trainers import CHECKPOINT_EVERY, Answered, Driver, Order, read, report
from qwen35_trainer.contract import parse_progress
from qwen35_trainer.contract.progress_report import CheckpointReport

DRIVER = Driver("running0", "running0-1-abcde", "running0-1-abcde-head", "running0-1-abcde-rollout")


def test_an_order_is_read_as_it_was_saved(tmp_path):
    order = Order("https://127.0.0.1:1", "/ca.crt", "token", "scale", (DRIVER, DRIVER), 60.0, 5.0)
    order.save(tmp_path / "order.json")
    assert Order.load(tmp_path / "order.json") == order


def test_drivers_begin_one_after_the_other_and_report_until_the_end():
    order = Order("https://127.0.0.1:1", "/ca.crt", "token", "scale", (DRIVER,) * 4, 1800.0, 5.0)
    assert [order.first(number) for number in range(4)] == [0, 30, 60, 90]
    assert order.expected == 360 + 354 + 348 + 342


def test_answered_reports_are_read_as_they_were_noted(tmp_path):
    (tmp_path / "reports.txt").write_text("running0 11 0 100.5\nrunning0 12 1 105.25\n")
    assert list(read(tmp_path / "reports.txt")) == [
        Answered("running0", 11, False, 100.5),
        Answered("running0", 12, True, 105.25),
    ]


def test_the_operator_can_read_every_report():
    for update in range(1, 3 * CHECKPOINT_EVERY):
        saved = CheckpointReport(uri=f"/run/checkpoints/{update}", update=update, time=time.time())
        sent = report(DRIVER, update, saved, 5.0)
        assert parse_progress(sent.model_dump_json(exclude_none=True)) == sent
        assert (sent.update, sent.cluster, sent.head) == (update, DRIVER.cluster, DRIVER.head)


async def test_a_submitted_job_runs_and_any_other_is_unknown():
    async with TestClient(TestServer(dashboards())) as client:
        assert (await client.get(READY_PATH)).status == 200
        assert (await client.get("/api/jobs/running0-1")).status == 404
        submitted = await client.post("/api/jobs/", json={"submission_id": "running0-1", "entrypoint": "qwen35 run"})
        assert (await submitted.json())["job_id"] == "running0-1"
        states = [await (await client.get("/api/jobs/running0-1")).json() for _ in range(2)]
        assert states[0] == states[1]
        assert states[0]["status"] == "RUNNING"
        assert (await client.get("/api/jobs/running1-1")).status == 404
