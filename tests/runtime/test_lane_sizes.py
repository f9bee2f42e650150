"""The straggler lane of vLLM replicas with more devices than those of the pool: one run, with fakes in the place of vLLM.

    rollout-0, 1 device ──stragglers──► lane-0, 2 devices
        ▲                                 ▲
        └───── the same publications ─────┘

The fakes are Torch engines, whose weights, sequences and versions are real. `tests/rollout/test_lane_of_split_replicas.py` has
vLLM's own engines.
"""

from dataclasses import replace
from typing import Any

import pytest

from qwen35_trainer.manifest import TrainingSpec, load_manifest
from qwen35_trainer.models.qwen3_5.build_model import ModelSettings, build
from qwen35_trainer.progress.records import SpanRecord, UpdateRecord
from qwen35_trainer.rollout import vllm, vllm_core
from qwen35_trainer.rollout.torch import TorchEngine
from qwen35_trainer.rollout.vllm_core import CoreSettings
from qwen35_trainer.runtime import driver

UPDATES, GROUPS, LAG = 4, 2, 2
LONG = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) + "0123456789= "
"""Characters of a tokenizer with which responses are long, because the end token is one of many."""
MANIFEST = {
    "model.source.random": {"headDim": 32, "linearHeadDim": 64, "characters": LONG},
    "data.maxResponseTokens": 100,
    "rollout": {"engine": "VLLM", "maxSequencesPerReplica": 4, "nodes": 3}
    | {"stragglerLane": {"nodes": 2, "tensorParallel": 2, "afterTokens": 8}},
    "train": {"updates": UPDATES, "batch": {"promptsPerUpdate": GROUPS, "microBatchSequences": 4}},
    "async": {"stalenessThreshold": 1.0, "maxVersionLag": LAG},
}


class Fake(TorchEngine):
    """Records each version that it begins to use, and one number of its weights."""

    used: dict[int, float]

    def commit(self, version: int) -> None:
        super().commit(version)
        self.used[version] = float(next(self._model.parameters()).detach().double().sum())


@pytest.fixture(scope="module")
def played(local, write, tmp_path_factory):
    """The ended run, and the engines in the order in which they were built, each with its number of devices."""
    file = write(
        tmp_path_factory.mktemp("sizes"),
        MANIFEST,
        reward="score = lambda prompt, response, answer, metadata: float(len(response))\n",
    )
    spec = load_manifest(file).spec
    engines: list[tuple[int, Fake]] = []

    def build_core(config: Any, settings: CoreSettings) -> CoreSettings:
        return settings

    def engine(core: CoreSettings, config: Any, *, end_token: int, max_length: int, **_: Any) -> Fake:
        vocabulary = config.get_text_config().vocab_size
        model = build(ModelSettings(spec.model, spec.seed, vocabulary, max_length, file.parent))
        fake = Fake(model, end_token=end_token, slots=core.slots, max_length=max_length, seed=core.seed)
        fake.used = {}
        engines.append((core.devices, fake))
        return fake

    decided = driver.coordinator_settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_core, "build_core", build_core)
        patch.setattr(vllm, "VLLMEngine", engine)
        # With one train worker, which is all that threads can play, a node has one device. The fake of two is on one node here.
        patch.setattr(TrainingSpec, "nodes_of_replica", lambda spec, *, lane: 1)
        # All stragglers move, although the fakes are equally fast.
        patch.setattr(driver, "coordinator_settings", lambda *of: replace(decided(*of), lane_breaks_even=False))
        yield local.run(file), engines


def test_the_engines_of_the_lane_have_its_number_of_devices(played):
    _, engines = played
    assert sorted(devices for devices, _ in engines) == [1, 2]


def test_stragglers_finish_in_the_lane_and_all_prompts_train_within_the_bound(played):
    ended, _ = played
    assert ended.code == 0, ended.err
    assert {span.lane for span in ended.of(SpanRecord) if span.kind == "generate"} == {"rollout-0", "lane-0"}
    assert sum(record.prompts for record in ended.of(UpdateRecord)) == UPDATES * GROUPS
    assert ended.summary["maxTokenLag"] <= LAG


def test_replicas_of_both_sizes_get_the_same_weights(played):
    _, engines = played
    pool, lane = (dict(engines)[devices].used for devices in (1, 2))
    both = pool.keys() & lane.keys()
    assert len(both) > 1
    assert {version: pool[version] for version in both} == {version: lane[version] for version in both}
    assert len({pool[version] for version in both}) == len(both), "the weights have changed"
