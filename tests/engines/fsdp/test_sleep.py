"""What a sleeping engine holds on its device, and that training continues as if it had not slept."""

import pytest
import torch

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.weights.parked_tensors import ParkedTensors, bytes_on
from tests.publications import published_by

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
SHARE = 0.1
"""Maximum share of its working set that a sleeping engine may hold."""
VARIANTS = {
    "all weights": {},
    "with a reference model, all layers gathered": {
        "algorithm.kl.placement": "Loss",
        "train.reshardAfterForward": False,
    },
    "bfloat16": {"model.precision": "BF16"},
    "adapters": {"train.lora": {"rank": 4, "alpha": 8}},
    "Muon": {"train.optimizer.type": "Muon"},
    "optimizer state in host memory": {"train.offload.optimizer": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_engine_that_sleeps_between_batches_trains_as_one_that_does_not(
    make_model, make_spec, make_batch, name
) -> None:
    batches = [make_batch(seed=seed) for seed in (0, 1)]
    engines = [FSDPEngine(Origin(make_model), make_spec(VARIANTS[name]), CPU) for _ in range(2)]
    metrics = []
    for engine in engines:
        of_engine = []
        for batch in batches:
            if engine is engines[1]:
                engine.wake()
            of_engine += engine.train(batch, [1e-3])
            if engine is engines[1]:
                change = engine.sleep()
                assert change.before > 0
                assert change.after <= SHARE * change.before, f"{change.after} of {change.before} bytes"
        metrics.append(of_engine)
    engines[1].wake()
    assert metrics[1] == metrics[0]
    expected, published = (published_by(engine) for engine in engines)
    assert published.keys() == expected.keys()
    assert all(torch.equal(published[name], values) for name, values in expected.items())


def test_what_counts_is_memory_and_not_names_for_it() -> None:
    table = torch.arange(8.0)
    assert bytes_on([table, table[:2], table.view(2, 4)], CPU) == 32
    parked = ParkedTensors([table, table[:2]], CPU)
    assert bytes_on([table], CPU) == 0
    parked.restore()
    assert table.tolist() == list(range(8))
    assert torch.equal(table[:2], torch.tensor([0.0, 1.0]))


def test_tensors_that_need_no_values_come_back_as_zeros() -> None:
    table = torch.arange(8.0)
    ParkedTensors([table], CPU, keep_values=False).restore()
    assert not table.any()
