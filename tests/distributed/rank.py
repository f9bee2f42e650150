"""One process of a group: python -m tests.distributed.rank RANK RANKS FOLDER PIPE. Carries out jobs from stdin (`group.py`)."""

import asyncio
import faulthandler
import gc
import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.utils.rnn import pad_sequence

from qwen35_trainer.engines.fsdp import lora
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin, origin
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.models.qwen3_5 import HFModule
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.models.qwen3_5.family import text_model
from qwen35_trainer.runtime.checkpoint_store import CheckpointMeta, CheckpointStore, load
from tests.distributed import wire
from tests.distributed.masters import masters
from tests.distributed.whole import whole
from tests.live_bytes import LiveBytes
from tests.models.scenes import vision_language
from tests.patience import PATIENCE
from tests.publications import published_by

CPU = torch.device("cpu")
VOCABULARY, LONGEST = 23, 64


def remembering(spec: TrainingSpec, seed: int) -> HFModule:
    """The spec's random model, with states that last: fresh weights forget within a few positions and hide leaks."""
    model = build(ModelSettings(spec.model, seed=seed, vocabulary=VOCABULARY, max_length=LONGEST, base=Path()))
    for layer in text_model(model).layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.fill_(-4.0)
    return model


def train(
    spec: dict[str, Any],
    batches: list[Any],
    rates: list[float],
    *,
    seed: int = 0,
    restore: Path | None = None,
    save: Path | None = None,
    folder: Path | None = None,
    pictured: dict[str, Any] | None = None,
    experts_of_all: list[int] | None = None,
) -> dict[str, Any]:
    """Log-probs of the first batch's trained tokens before the first update (samples, longest response), metrics of each
    update, the clipped gradient by which each update stepped, first and final weights and adapters, and how many
    values of parameters this rank held.

    The model is the spec's random one, what a `folder` holds, or a `pictured` vision-language one. With `experts_of_all`, every
    token goes to these experts.
    """
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    source = Origin(lambda: remembering(parsed, seed))
    if folder is not None:
        source = origin(parsed.model, seed=seed, vocabulary=VOCABULARY, max_length=LONGEST, base=folder)
    if pictured is not None:
        source = Origin(lambda: vision_language(**pictured))
    engine = FSDPEngine(source, parsed, CPU)
    if experts_of_all is not None:
        send_all_tokens_to(engine, experts_of_all)
    if restore is not None:
        engine.restore(restore)
    adapters = adapters_of(engine)
    gradients, first = gradients_of(engine), {name: each.clone() for name, each in masters(engine).items()}
    scores = [scores_of(engine, batch) for batch in batches[:1]]
    metrics = [
        measured
        for batch, rate in zip(batches, rates, strict=True)
        for measured in engine.train(share_of(engine, batch), [rate] * batch.updates)
    ]
    if save is not None:
        engine.save(save)
        assert engine.saved(wait=True)
    held = sum(p.to_local().numel() for p in engine._model.parameters())
    results = {"metrics": metrics, "weights": masters(engine), "adapters": adapters, "held": held}
    results |= {"first weights": first, "published": published_by(engine)}
    return results | {"scores": scores, "gradients": gradients, "trained adapters": adapters_of(engine)}


def send_all_tokens_to(engine: FSDPEngine, experts: list[int]) -> None:
    """Let routers choose only `experts` for every token: no token goes to the others, and none to ranks that own no such expert."""
    for layer in text_model(engine._model).layers:
        route = layer.mlp.gate.forward

        def chosen(
            hidden: Tensor, _: None = None, route: Callable[[Tensor], tuple[Tensor, ...]] = route
        ) -> tuple[Tensor, ...]:
            logits, weights, _ = route(hidden)
            return logits, weights, torch.tensor(experts).expand(len(logits), -1)

        layer.mlp.gate.forward = chosen


def memory(spec: dict[str, Any], batch: TrainBatch, *, vocabulary: int, pictured: bool = False) -> dict[str, int]:
    """Bytes of this rank's tensors between two batches, and at most during the second one."""
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    settings = ModelSettings(parsed.model, seed=0, vocabulary=vocabulary, max_length=4096, base=Path())
    gc.collect()
    with LiveBytes() as live:
        engine = FSDPEngine(Origin(lambda: build(settings)), parsed, CPU, pictures=pictured)
        engine.train(share_of(engine, batch), [1e-3])
        gc.collect()
        live.restart()
        state = live.now
        engine.train(share_of(engine, batch), [1e-3])
    return {"state": state, "peak": live.maximum}


def share_of(engine: FSDPEngine, batch: TrainBatch) -> TrainBatch:
    """The part of a batch that the driver sends to this rank."""
    return engine._division.share(batch, engine._ranks.data_share)


def scores_of(engine: FSDPEngine, batch: TrainBatch) -> Tensor:
    """Log-probs of trained tokens, 0 for others, (samples, longest response), of all shares. Collective."""
    scores = torch.from_numpy(engine.log_probs(share_of(engine, batch)))
    return pad_sequence(scores.split(batch.response_lengths.tolist()), batch_first=True)


def adapters_of(engine: FSDPEngine) -> dict[str, Tensor]:
    """Collective."""
    named = engine._model.named_parameters()
    return whole({name: parameter for name, parameter in named if name.endswith((lora.DOWN, lora.UP))})


def gradients_of(engine: FSDPEngine) -> list[dict[str, Tensor]]:
    """Will hold, for each update, the whole gradient of each parameter when its optimizer steps."""
    names = {parameter: name for name, parameter in engine._model.named_parameters()}
    results: list[dict[str, Tensor]] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is engine._optimizers.parts[0]:
            results.append({})
        stepped = [each for group in optimizer.param_groups for each in group["params"]]
        results[-1] |= whole({names[each]: each.grad for each in stepped if each.grad is not None})

    for part in engine._optimizers.parts:
        part.register_step_pre_hook(keep)
    return results


def die_in_the_middle_of_a_save(spec: dict[str, Any], batches: list[Any], store: Path, *, bytes_allowed: int) -> None:
    """Checkpoint after the first batch, then train the second and be killed by the kernel while that one is written."""
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    engine, checkpoints = FSDPEngine(Origin(lambda: remembering(parsed, 0)), parsed, CPU), CheckpointStore(store, 3)
    _checkpoint(engine, checkpoints, 1, batches[0])
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, bytes_allowed))
    _checkpoint(engine, checkpoints, 2, batches[1])


def timeouts(spec: dict[str, Any]) -> set[float]:
    """Seconds that an exchange may take in each of the groups that an engine makes."""
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    engine = FSDPEngine(Origin(lambda: remembering(parsed, 0)), parsed, CPU)
    groups = [*engine._ranks.mesh.get_all_groups(), engine._ranks.context_group, engine._storage]
    if (experts := engine._ranks.experts) is not None:
        groups += [*experts.expert.get_all_groups(), *experts.shard.get_all_groups()]
    made = [group for group in groups if group is not None]
    return {group._get_backend(CPU).options._timeout.total_seconds() for group in made}


def go_on(spec: dict[str, Any], batches: list[Any], store: Path) -> dict[str, Any]:
    """Resume from the newest checkpoint, and train the batches after it."""
    parsed, problems = parse_spec(spec)
    assert parsed is not None, problems
    engine = FSDPEngine(Origin(lambda: remembering(parsed, 7)), parsed, CPU)
    newest = CheckpointStore(store, 3).latest()
    assert newest is not None
    engine.restore(newest.path)
    metrics = [engine.train(share_of(engine, batch), [1e-3])[0] for batch in batches[newest.progress.update :]]
    return {"from": newest.path.name, "metrics": metrics}


def _checkpoint(engine: FSDPEngine, checkpoints: CheckpointStore, update: int, batch: Any) -> None:
    """What the driver does, on rank 0, and the workers do, on all: the folder is there before any of them writes."""
    engine.train(share_of(engine, batch), [1e-3])
    progress = CheckpointMeta(update=update, batch=update, position=0, pending=(), elapsed=0.0)
    partial = checkpoints.folder / f".update-{update:06d}.partial"

    async def write(folder: Path) -> None:
        assert folder == partial
        dist.barrier()
        engine.save(folder)
        assert engine.saved(wait=True)

    if dist.get_rank() == 0:
        path = asyncio.run(checkpoints.save(progress, write))
        assert load(path).progress == progress
    else:
        asyncio.run(write(partial))
    dist.barrier()


def refuse(ranks: list[int]) -> None:
    """Raise on these ranks; the others never answer."""
    if dist.get_rank() in ranks:
        raise ValueError("refused")
    signal.pause()


def threads_of_connections() -> int:
    """How many threads of this process serve connections of groups: those of this job, and of groups that a job before left."""
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def main(
    rank: int, ranks: int, folder: Path, pipe: int, jobs: dict[str, Any], forget: Callable[[], None] = lambda: None
) -> None:
    """jobs: functions by name, besides those of this module. forget: lets go of groups that a library holds after a job."""
    faulthandler.enable()
    torch.set_num_threads(1)
    jobs = globals() | jobs
    for number in count():
        try:
            job, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        threads = threads_of_connections()
        store = dist.FileStore(str(folder / f"store-{number}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE))
        try:
            answer = ("done", jobs[job](**arguments))
        except (Exception, CheckpointException):  # noqa: BLE001  # CheckpointException is not an Exception; the test gets both
            answer = ("raised", traceback.format_exc())
        body = wire.dumps((*answer, threads))
        with os.fdopen(os.dup(pipe), "wb") as out:
            out.write(len(body).to_bytes(8) + body)
        try:  # every rank has answered by the next message, so none is still making a connection that this one closes
            pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        # With the groups of the job's engines. Each has a thread that wakes a hundred times a second, for as long as it lives.
        forget()
        dist.destroy_process_group()
        while gc.collect():  # what the first round frees held other groups
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), globals())
