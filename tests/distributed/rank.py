"""One process of a group, for test_fsdp.py: python rank.py RANK RANKS FOLDER.

FOLDER/job.pickle says what to do: build the seeded model, restore a checkpoint if named, train the batches, save if named.
"""

import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.models.qwen3_5.build import build
from qwen35_trainer.spec import parse_spec


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    job = pickle.loads((folder / "job.pickle").read_bytes())
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    spec, problems = parse_spec(job["spec"])
    assert spec is not None, problems
    model = build(spec.model, seed=job["seed"], vocabulary=23, max_length=64, base=folder)
    engine = FSDPEngine(model, spec, torch.device("cpu"))
    if job["restore"]:
        engine.restore(Path(job["restore"]))
    metrics = [engine.train(batch, [1e-3])[0] for batch in job["batches"]]
    if job["save"]:
        engine.save(Path(job["save"]))
    weights = engine.weights()
    if rank == 0:
        (folder / "result.pickle").write_bytes(pickle.dumps((metrics, weights)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
