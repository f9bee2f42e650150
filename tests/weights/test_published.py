"""A publication through Ray's object store: what is put there, and what its references say."""

import ray
import torch

from qwen35_trainer.weights import published, weight_buckets
from qwen35_trainer.weights.weight_buckets import unpack


def test_every_bucket_is_put_once_and_in_order(monkeypatch) -> None:
    stored = []

    def put(bucket):
        stored.append(bucket.copy())
        return f"bucket {len(stored)}"

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(weight_buckets, "BUCKET_BYTES", 16)
    weights = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    publication = published.put(weights.items(), version=4)
    assert publication.buckets == ("bucket 1", "bucket 2", "bucket 3")
    assert publication.manifest.version == 4
    read = unpack(publication.manifest, stored)
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
