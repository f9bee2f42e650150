"""Versions of the weights: each is let go when all have newer ones, since it takes as much memory as the model."""

import gc
from itertools import count

from qwen35_trainer.weights.published import PublishedWeights

UPDATES = 6


def test_the_first_versions_are_gone_when_the_last_batch_has_trained(local, write, tmp_path):
    answered, alive = count(1), set[int]()

    def look(kind: str, method: str, value: object) -> None:
        if (kind, method) == ("TrainWorker", "train") and next(answered) == UPDATES:
            gc.collect()
            alive.update(each.manifest.version for each in gc.get_objects() if type(each) is PublishedWeights)

    running = local.start("run", write(tmp_path, {"train.updates": UPDATES}), output=tmp_path / "out", look=look)
    assert running.end().code == 0
    assert alive, "what is looked for has another name"
    assert min(alive) >= UPDATES - 3, "the replicas have this one, another travels, and a third is being copied"
