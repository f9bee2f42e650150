"""After each publication the trainer and every replica compare the log-probs of the same tokens."""

import pytest
import torch

from qwen35_trainer.progress.records import FinishRecord, UpdateRecord
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.runtime import probe_schedule

WRONG = "model.layers.1.mlp.down_proj.weight"
DIFFERS = "with the weights of version {version}, its log-probs differ from the trainer's by "


@pytest.fixture(autouse=True)
def every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version gets a probe, however long that takes next to the updates of a tiny model."""
    monkeypatch.setattr(probe_schedule, "PROBE_SHARE", 1e9)


@torch.no_grad()
def corrupt(engine: TorchEngine) -> None:
    """Change one parameter of an engine. Its tensor is shared with other engines, so it is replaced."""
    parameter = engine._parameters[WRONG]
    parameter.data = parameter.data * -20.0


@pytest.mark.parametrize("limit", [0.1, 0.0])
def test_replicas_agree_with_the_trainer_in_every_version(local, write, tmp_path, limit) -> None:
    file = write(tmp_path, {"rollout.nodes": 2, "train.updates": 6, "publication.maxLogProbDifference": limit})
    ended = local.run(file, output=tmp_path / "out")
    assert ended.code == 0, ended.err
    updates = ended.of(UpdateRecord)
    probed = [record for record in updates if record.probe_difference_mean is not None]
    assert all(record.probe_difference_mean <= record.probe_difference_max < 1e-4 for record in probed)
    assert len(probed) >= 3 if limit else not probed


def test_a_replica_with_one_wrong_parameter_is_replaced_and_the_parameter_is_named(
    local, write, tmp_path, monkeypatch
) -> None:
    """The first replica damages version 2 while it puts it in service. All bytes have arrived."""
    commit, damaged = TorchEngine.commit, list[TorchEngine]()

    def damaging(engine: TorchEngine, version: int) -> None:
        commit(engine, version)
        if version == 2 and not damaged:
            damaged.append(engine)
            corrupt(engine)

    monkeypatch.setattr(TorchEngine, "commit", damaging)
    file = write(tmp_path, {"rollout.nodes": 2, "train.updates": 16})
    ended = local.run(file, output=tmp_path / "out")
    assert ended.code == 0, ended.err
    assert [record.update for record in ended.of(UpdateRecord)] == list(range(1, 17))
    [loss] = [
        line
        for line in (ended.folder / "logs" / "driver.log").read_text().splitlines()
        if "other replicas take over its sequences" in line
    ]
    assert DIFFERS.format(version=2) in loss
    assert f"its parameters differ from the published ones in {WRONG};" in loss


def test_a_run_ends_if_no_replica_computes_what_the_trainer_computes(local, write, tmp_path, monkeypatch) -> None:
    """As with kernels that compute something else: every replica has the published parameters, and other log-probs."""
    commit = TorchEngine.commit

    def elsewhere(engine: TorchEngine, version: int) -> None:
        commit(engine, version)
        corrupt(engine)

    monkeypatch.setattr(TorchEngine, "commit", elsewhere)
    ended = local.run(write(tmp_path, {"rollout.nodes": 2}), output=tmp_path / "out")
    assert ended.code == 1
    finish = ended.of(FinishRecord)[-1]
    assert (finish.outcome, finish.reason) == ("Failed", "LogProbsDiffer")
    assert finish.message.startswith("no replica computes the trainer's log-probs. ")
    for name in ("rollout-0", "rollout-1"):
        assert f"{name}: LogProbsDiffer: {DIFFERS.format(version=0)}" in finish.message
    assert (
        "loading the version again changes no parameter, so its kernels, or what it does not load, are wrong"
        in finish.message
    )
