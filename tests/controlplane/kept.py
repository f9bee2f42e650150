"""The manifests that `make test` tries on the API server, and what they reach.

    python -m tests.controlplane.kept          chooses them again, from 720 + 120 draws of manifests.py

A draw is kept when it reaches something that no draw before it does: a field of the definition, a fragment of a pod template
in a pool, a check of the models that fails, or that passes by as all do, a kind of problem that the operator reports, a
refusal of the models. A few are written by hand, for what draws seldom reach. Nothing of it is known from the API server: what that makes of them, the tests ask.
`make soak` draws new ones.
"""

import json
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from qwen35_operator.api import crd
from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import acceptance
from qwen35_trainer.manifest import ManifestError, parse_manifest, parse_spec
from qwen35_trainer.manifest.checks import CHECKS, NEW_TRAINING_CHECKS
from tests.controlplane.pod_templates import FRAGMENTS
from tests.manifest.conftest import SMALL

type Document = dict[str, Any]

FILE = Path(__file__).with_name("kept_manifests.json")
DRAWS = {"sane": 720, "mad": 120}
POOLS = ("head", "rollout", "train")
CREATED = datetime(2026, 1, 1, tzinfo=UTC)


# What draws seldom reach.
WRITTEN: list[Document] = [
    {
        "algorithm": {
            "loss": {
                "type": "PPOClip",
                "aggregation": "TokenMean",
                "clipLow": 0.1,
                "clipHigh": 0.3,
                "dualClip": 4.0,
                "tauPositive": 1.1,
                "tauNegative": 1.2,
            },
            "kl": {
                "placement": "LossAndReward",
                "coefficient": 0.01,
                "estimator": "K1",
                "rewardCoefficient": 0.02,
                "rewardEstimator": "K3",
                "adaptive": {"target": 0.2, "horizon": 1000},
            },
            "correction": {"type": "IcePop", "cap": 3.0, "floor": 0.25},
            "gamma": 0.9,
            "entropyCoefficient": 0.01,
            "reportEntropy": False,
            "maskTruncated": True,
            "overlongPenalty": {"bufferTokens": 16, "weight": 0.5},
        },
        "async": {
            "stalenessThreshold": 1.0,
            "maxVersionLag": 2,
            "onMissedDeadline": "Discard",
            "adaptiveDispatch": True,
            "partialRollout": True,
            "updatesPerBatch": 2,
            "batchesPerPublication": 2,
        },
        "publication": {
            "transport": "Folder",
            "folder": "/publications",
            "wholeEvery": 8,
            "bucketMebibytes": 1024,
            "maxLogProbDifference": 0.2,
        },
        "checkpoint": {
            "export": "AtEnd",
            "graceSeconds": 60,
            "storage": {"persistentVolumeClaim": {"claimName": "kept", "path": "a/b"}},
        },
        "disruptionBudget": "HeadAndTrain",
        "failurePolicy": {
            "rules": [
                {"name": "mine", "action": "Fail", "onPool": "train", "onExitCodes": [1], "onReasons": ["Error"]},
                {"name": "other", "action": "Restart", "onMessagePattern": "NCCL"},
            ]
        },
        "pods": {
            "env": [
                {"name": "A", "value": "b"},
                {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ],
            "sizing": "Profile",
            "tls": {"secretName": "ray-ca"},
            "head": FRAGMENTS[4],
            "train": FRAGMENTS[15],
        },
        "train": {
            "batch": {
                "dynamicMicroBatches": True,
                "promptsPerUpdate": 4,
                "removePadding": True,
                "sharePrompts": True,
            },
            "collectiveTimeoutSeconds": 900.0,
            "headPrecision": "FP32",
            "reshardAfterForward": False,
            "activationCheckpointing": True,
            "offload": {"activations": True},
            "optimizer": {"beta1": 0.8, "decayAll": True, "gradientClip": 0.5, "warmupUpdates": 3},
            "router": {"loadBalancingLoss": 0.01, "zLoss": 0.001, "replay": True},
            "multiTokenPrediction": {"lossWeight": 0.3, "detached": True},
        },
        "rollout": {
            "engine": "VLLM",
            "vllm": {"extraArguments": {"block_size": 32, "disable_custom_all_reduce": True, "kernel_config": "a"}},
        },
    },
    {
        "accelerator": {"profile": "CPU", "devicesPerNode": 8},
        "algorithm": {
            "advantage": "Function",
            "advantageFunction": "mine.advantages:centred",
            "loss": {"type": "Function", "function": "mine.losses:squared"},
        },
        "data": {
            "train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 8}}],
            "validation": [{"name": "held", "files": {"paths": ["a.jsonl"], "answerField": "answer"}}],
        },
        "model": {
            "name": "tiny",
            "source": {
                "random": {
                    "attentionHeads": 6,
                    "experts": 8,
                    "vision": {"depth": 3, "headDim": 8, "heads": 2, "patchSize": 8, "positionGrid": 4},
                }
            },
        },
        "train": {
            "parallelism": {
                "tensor": 1,
                "pipeline": 1,
                "virtualPipeline": 1,
                "context": 1,
                "copies": 2,
                "expert": 2,
                "expertTensor": 1,
            },
            "batch": {"promptsPerUpdate": 8},
        },
    },
    {
        "algorithm": {
            "advantage": "PassAtK",
            "loss": {"type": "DPPOBinaryKL", "maxDivergence": 0.1},
            "correction": {"type": "None"},
        },
        "train": {
            "engine": "Megatron",
            "updates": 10,
            "batch": {"promptsPerUpdate": 4},
            "overrideTransformerConfig": {"bias_activation_fusion": True, "attention_backend": "fused"},
        },
    },
]


@cache
def load() -> dict[str, list[Document]]:
    """By kind: `sane`, whose pod templates are what people write, and `mad`, with anything that the schema lets through."""
    chosen: dict[str, list[Document]] = json.loads(FILE.read_text())
    written = [SMALL | {"metadata": {"name": "demo"}, "spec": SMALL["spec"] | item} for item in WRITTEN]
    return {"sane": [*chosen["sane"], *written], "mad": chosen["mad"]}


def reached(manifest: Document) -> set[str]:
    """What the manifest reaches, a word for each."""
    features = {f"field {path}" for path in _fields(manifest["spec"], crd.schema()["properties"]["spec"], "spec")}
    for pool in POOLS:
        template = manifest["spec"].get("pods", {}).get(pool)
        features |= {
            f"fragment {n}" for n, item in enumerate(FRAGMENTS) if template is not None and _within(item, template)
        }
    features |= {f"label {name}" for name in manifest["metadata"].get("labels", {})}
    features |= {f"mode {manifest['spec'].get('mode', 'FullyAsync')}"}
    features |= {f"profile {manifest['spec'].get('accelerator', {}).get('profile')}"}
    features |= set(_judged(manifest))
    return features


def everything() -> set[str]:
    """What the kept ones must reach: each field that may be written, and each fragment. tests/manifest has each check fail."""
    schema = crd.schema()["properties"]["spec"]
    return {f"field {path}" for path in _paths(schema, "spec")} | {f"fragment {n}" for n in range(len(FRAGMENTS))}


def _judged(manifest: Document) -> Iterator[str]:
    try:
        parse_manifest(deepcopy(manifest))
    except ManifestError as error:
        yield from (f"refused {_kind(problem.message)}" for problem in error.problems)
    spec, problems = parse_spec(deepcopy(manifest["spec"]))
    if spec is None:
        return
    for check, _ in (*CHECKS, *NEW_TRAINING_CHECKS):
        if list(check(spec)):
            yield f"check {check.__name__}"
    if problems:
        return
    metadata = manifest["metadata"]
    training = TrainingResource(metadata["name"], "team", "0" * 36, 1, spec, metadata.get("labels", {}))
    refusals = acceptance.refusals(training, OperatorSettings())
    yield from (f"problem {_kind(item.message)}" for item in refusals)
    if not refusals:
        yield "accepted"


def _kind(message: str) -> str:
    """The message without what is a matter of the value."""
    return re.sub(r"['\"`].*?['\"`]|\S*[^a-zA-Z ,.:]\S*", "…", message)[:60]


def _fields(value: Any, node: Document, path: str) -> Iterator[str]:
    """Paths of the fields that are written."""
    if isinstance(value, dict):
        for name, inside in value.items():
            if name in (properties := _properties(node)):
                yield f"{path}.{name}"
                yield from _fields(inside, properties[name], f"{path}.{name}")
    elif isinstance(value, list):
        for inside in value:
            yield from _fields(inside, node.get("items", {}), f"{path}[]")


def _paths(node: Document, path: str) -> Iterator[str]:
    for name, inside in _properties(node).items():
        yield f"{path}.{name}"
        yield from _paths(inside, f"{path}.{name}")
    if "items" in node:
        yield from _paths(node["items"], f"{path}[]")


def _properties(node: Document) -> Document:
    """The fields of a section. Those of a pod template are left out: the fragments reach them."""
    return {} if "x-kubernetes-preserve-unknown-fields" in node else dict(node.get("properties", {}))


def _within(part: Any, whole: Any) -> bool:
    """Whether the template says all that the fragment says."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and _within(item, whole[key]) for key, item in part.items())
    return bool(part == whole)


def choose(draws: list[Document]) -> list[Document]:
    """Of equally useful draws the shorter one: always the one that reaches most of what is not reached yet."""
    remaining = sorted(((reached(item), item) for item in draws), key=lambda pair: len(json.dumps(pair[1])))
    missing = set().union(*(words for words, _ in remaining))
    chosen = []
    while missing:
        words, best = max(remaining, key=lambda pair: len(pair[0] & missing))
        missing -= words
        chosen.append(best)
    return chosen


def _drawn(count: int, *, mad: bool) -> list[Document]:
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.controlplane.manifests import manifests

    drawn: list[Document] = []

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(manifest=manifests(mad=mad))
    def draw(manifest: Document) -> None:
        drawn.append(json.loads(json.dumps(manifest)))

    draw()
    return drawn


if __name__ == "__main__":
    kept = {kind: choose(_drawn(count, mad=kind == "mad")) for kind, count in DRAWS.items()}
    FILE.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    print({kind: len(chosen) for kind, chosen in kept.items()}, file=sys.stderr)
