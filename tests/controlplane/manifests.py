"""Whole manifests over every field of the custom resource: valid types, wild combinations.

    the definition's schema ─► a value of the right type for each field ─► mended, mostly ─► manifest
                                                                            ▲
                    pod templates: within the fence, around it, or mad ─────┘

Fields come from the schema, so that a new one is drawn without a change here. Drawn blindly, next to no manifest would
be admitted: sizes are mostly powers of two, and what excludes each other is mostly put right.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from qwen35_operator.api import crd
from tests.controlplane.pod_templates import SELDOM, Document, mad_templates, sane_templates

SCHEMA = crd.schema()["properties"]["spec"]
POWERS = st.sampled_from([1, 1, 1, 2, 2, 4, 8])
# Sizes that often fit together, by the end of their path.
SIZES: dict[str, SearchStrategy[Any]] = {
    "devicesPerNode": st.sampled_from([1, 2, 4, 8, 8, 16]),
    "tensor": POWERS,
    "pipeline": st.sampled_from([1, 1, 1, 2]),
    "virtualPipeline": st.sampled_from([1, 1, 1, 2]),
    "context": st.sampled_from([1, 1, 1, 2]),
    "expert": POWERS,
    "expertTensor": st.sampled_from([1, 1, 1, 2]),
    "tensorParallel": POWERS,
    "nodes": st.sampled_from([1, 1, 2, 2, 3, 4]),
    "minNodes": st.sampled_from([1, 1, 2]),
    "maxNodes": st.sampled_from([2, 4, 8, 1024]),
    "groupSize": st.sampled_from([1, 2, 4, 8, 16]),
    "promptsPerUpdate": st.sampled_from([8, 16, 32, 64, 96]),
    "microBatchSequences": st.sampled_from([1, 1, 1, 2]),
    "stalenessThreshold": st.sampled_from([0, 0.25, 0.5, 1, 2.0, 4]),
    "maxVersionLag": st.integers(0, 8),
    "function": st.sampled_from(["rewards:score", "pack.module:name"]),
    "advantageFunction": st.sampled_from(["advantages:centred", "pack.module:name"]),
    "onMessagePattern": st.sampled_from(["CUDA error", "^lost .* after [0-9]+ s$", "(?i)nccl", "[", "(?P<a>x)(?P=a)"]),
    "extract": st.sampled_from(["<answer>(.*)</answer>", "(", r"\d+", "(?<=x)y"]),
    "config{}": st.one_of(st.booleans(), st.integers(-9, 9), st.just(0.5), *[st.just("text")] * 4, st.just([1])),
    "claimName": st.sampled_from(["models", "data", "checkpoints", "team-a.models", "0"]),
    "path": st.sampled_from(["a", "b/c", "./b", "a//b", "über/ß", "with space", "x", "y/z", "/abs/olute", "a/../.."]),
    "paths[]": st.sampled_from(["a.jsonl", "b/c.parquet", "d.jsonl", "e//f.jsonl", "../up.jsonl", "x" * 1024]),
}
EXCLUSIVE = {
    "model.source": ("persistentVolumeClaim", "path", "random"),
    "data.train[]": ("files", "gym"),
    "data.validation[]": ("files", "gym"),
    "checkpoint.storage": ("persistentVolumeClaim", "path"),
    "pods.env[]": ("value", "valueFrom"),
}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


@st.composite
def manifests(draw: st.DrawFn, *, mad: bool = False) -> Document:
    """A manifest; with `mad`, pod templates and names may be anything that the schema lets through."""
    wild = not mad and draw(st.sampled_from([False, False, True]))
    spec = draw(_object(SCHEMA, "", wild))
    if mad or not draw(SELDOM):
        _mend(spec, draw)
    for pool in ("head", "rollout", "train"):
        spec.get("pods", {}).pop(pool, None)
    for pool in draw(st.lists(st.sampled_from(["head", "rollout", "train"]), max_size=2, unique=True)):
        spec.setdefault("pods", {})[pool] = draw(mad_templates() if mad else sane_templates())
    metadata: Document = {"name": draw(NAMES if mad else st.sampled_from(["demo", "run-2", "a" * 40]))}
    if labels := draw(
        st.dictionaries(st.sampled_from(LABELS), st.sampled_from(["rl", "a.b_c", "", "x" * 63]), max_size=2)
    ):
        metadata["labels"] = labels
    return {"apiVersion": "rl.qwen35.io/v1alpha1", "kind": "Qwen35Training", "metadata": metadata, "spec": spec}


NAMES = st.sampled_from(
    [*["demo"] * 50, "0", "7b", "a" * 40, "a" * 41, "a.b", "a-", "-a", "Demo", "x" * 63, "a" * 253, "a_b", ""]
)
LABELS = [
    "kueue.x-k8s.io/queue-name",
    "volcano.sh/queue-name",
    "team",
    "ray.io/priority-class-name",
    "ray.io/scheduler-name",
]


# By schema.


def _any(node: Document, path: str, wild: bool) -> SearchStrategy[Any]:
    """A value of the node's type; a wild one now and then lies at or beyond a bound, or is null."""
    name = path.rsplit(".", 1)[-1]
    if "properties" in node and "x-kubernetes-preserve-unknown-fields" not in node:
        return _object(node, path, wild)
    if "items" in node:
        return _list(node, path, wild)
    if "additionalProperties" in node:
        values = _any(node["additionalProperties"], f"{path}{{}}", wild)
        return st.dictionaries(st.sampled_from(["min_terms", "max_digits", "ops", "ß"]), values, max_size=2)
    tame = SIZES[name] if name in SIZES else _scalar(node)
    return st.one_of(*[tame] * 9, _edges(node)) if wild else tame


@st.composite
def _object(draw: st.DrawFn, node: Document, path: str, wild: bool) -> Document:
    required = node.get("required", [])
    others = [name for name in node["properties"] if name not in required]
    picked = draw(st.lists(st.sampled_from(others), max_size=4, unique=True)) if others else []
    if not path:
        picked = sorted({*picked, "rollout", "rewards", "train", "accelerator"})
    names = [name for name in node["properties"] if name in required or name in picked]
    made = {name: draw(_any(node["properties"][name], f"{path}.{name}".lstrip("."), wild)) for name in names}
    options = EXCLUSIVE.get(path, ())
    if options and not (wild and draw(SELDOM)):
        kept = draw(st.sampled_from(options))
        made = {name: value for name, value in made.items() if name not in options}
        made[kept] = draw(_any(node["properties"][kept], f"{path}.{kept}", wild))
    return made


@st.composite
def _list(draw: st.DrawFn, node: Document, path: str, wild: bool) -> list[Any]:
    most = min(node["maxItems"], 3)
    items = draw(
        st.lists(_any(node["items"], f"{path}[]", wild), min_size=min(node.get("minItems", 0), most), max_size=most)
    )
    if not (wild and draw(SELDOM)):
        for number, item in enumerate(items):
            if isinstance(item, dict) and "name" in item:
                item["name"] = f"{path.rsplit('.', 1)[-1]}{number}"
    return items


def _scalar(node: Document) -> SearchStrategy[Any]:
    match node.get("type"):
        case _ if "enum" in node:
            return st.sampled_from(node["enum"])
        case "boolean":
            return st.booleans()
        case "integer":
            low, step = node.get("minimum", 0), node.get("multipleOf", 1)
            return st.integers(low, min(node.get("maximum", low + 9), low + 9)).map(
                lambda value: -(-value // step) * step
            )
        case "number":
            low, high = node.get("minimum", -1e3), node.get("maximum", 1e3)
            inside = st.floats(low, high, exclude_min=node.get("exclusiveMinimum", False) and low < high)
            return inside.filter(lambda value: not (node.get("exclusiveMaximum") and value == high))
        case "string":
            return _text(node)
    return st.just({})


def _text(node: Document) -> SearchStrategy[str]:
    least, most = node.get("minLength", 0), node["maxLength"]
    if "pattern" not in node:
        return TEXTS.map(lambda text: (text + "x" * least)[:most])
    pattern = re.compile(node["pattern"].removesuffix("$") + r"\Z")
    return st.from_regex(pattern).map(lambda text: text[:most]).filter(lambda text: pattern.search(text) is not None)


def _edges(node: Document) -> SearchStrategy[Any]:
    """The bounds, what lies beyond them, another type, null."""
    edges: list[Any] = [None, "", "1", 1, 2.0, 2**40, True, [], {}]
    for bound in (node.get("minimum"), node.get("maximum")):
        edges += [] if bound is None else [bound, bound - 1, bound + 1]
    if "multipleOf" in node:
        edges += [node["multipleOf"] * 3, node["multipleOf"] * 3 + 1]
    if "maxLength" in node:
        edges += ["x" * node["maxLength"], "x" * (node["maxLength"] + 1), "ß", "a\n"]
    return st.sampled_from(edges)


# Put right: what arithmetic would refuse in nearly every draw. A wild value may have any type, and stays.


def _mend(spec: Document, draw: Callable[[SearchStrategy[Any]], Any]) -> None:
    mode = spec.get("mode", "FullyAsync")
    if mode == "SFT":
        spec.pop("rollout", None)
        spec.pop("rewards", None)
    else:
        _mend_rewards(spec)
        _mend_rollout(_section(spec, "rollout"), _nodes(spec), _devices(spec), mode)
    _mend_train(_section(spec, "train"), _nodes(spec) * _devices(spec))
    if "random" in _section(_section(spec, "model"), "source"):
        _section(_section(spec, "train"), "parallelism").pop("expert", None)  # the number of experts limits it
    algorithm = _section(spec, "algorithm")
    algorithm["groupSize"] = draw(st.sampled_from([2, 8, 16]))
    loss = _section(algorithm, "loss")
    loss.pop("clipLow", None)
    for section, chosen, name in ((loss, "type", "function"), (algorithm, "advantage", "advantageFunction")):
        section.pop(name, None)
        if section.get(chosen) == "Function":
            section[name] = "pack.module:name"
    if draw(st.booleans()):
        algorithm.pop("correction", None)
    algorithm.pop("overlongPenalty", None)
    _mend_kl(_section(algorithm, "kl"))
    divergence_masked = str(loss.get("type")).startswith("DPPO")
    if divergence_masked or loss.get("type") == "SAPO":
        algorithm["correction"] = {"type": "None"}
    if not divergence_masked:
        loss.pop("maxDivergence", None)
    if draw(st.integers(0, 3)):  # the others stay as a later release may run them
        _mend_engines(spec)
    knobs = _section(spec, "async")
    if mode != "FullyAsync":
        del spec["async"]
    elif _number(knobs, "maxVersionLag", 4) < _number(knobs, "stalenessThreshold", 1) or "partialRollout" in knobs:
        knobs["stalenessThreshold"], knobs["maxVersionLag"] = 0.5, 1


def _mend_kl(kl: Document) -> None:
    if kl.get("placement") != "LossAndReward":
        kl.pop("rewardCoefficient", None)
        kl.pop("rewardEstimator", None)
    if kl.get("placement", "None") == "None" or kl.get("rewardCoefficient", kl.get("coefficient", 1)) == 0:
        kl.pop("adaptive", None)


def _mend_engines(spec: Document) -> None:
    train, rollout = _section(spec, "train"), spec.get("rollout", {})
    train.pop("engine", None)
    for axis in ("tensor", "pipeline", "virtualPipeline", "expert", "expertTensor"):
        _section(train, "parallelism").pop(axis, None)
    rollout.pop("engine", None)
    rollout.pop("tensorParallel", None)
    for name in ("advantage", "advantageFunction"):
        spec["algorithm"].pop(name, None)


def _section(parent: Document, name: str) -> Document:
    if not isinstance(parent.get(name), dict):
        parent[name] = {}
    section: Document = parent[name]
    return section


def _number(section: Document, name: str, default: float) -> float:
    value = section.get(name)
    return value if isinstance(value, (int, float)) and value >= 1 else default


def _nodes(spec: Document) -> int:
    return int(_number(_section(spec, "train"), "nodes", 1))


def _devices(spec: Document) -> int:
    return int(_number(_section(spec, "accelerator"), "devicesPerNode", 8))


def _mend_rewards(spec: Document) -> None:
    rewards = [reward for reward in spec.get("rewards") or () if isinstance(reward, dict)]
    for number, reward in enumerate(rewards):
        reward["name"] = f"reward{number}"
        reward.pop("extract", None)
        reward.pop("function", None)
        if reward["type"] == "Function":
            reward["function"] = "rewards:score"
        if reward["type"] == "Gym":
            reward["type"] = "Math"
    spec["rewards"] = rewards or [{"type": "Math"}]


def _mend_train(train: Document, world: int) -> None:
    cut = _section(train, "parallelism")
    cut.pop("context", None)  # heads limit it, and those of a checkpoint are not in the manifest
    if train.get("engine") == "Megatron":
        cut.pop("copies", None)
    _section(train, "offload")["gradients"] = False
    _section(train, "offload").pop("activations", None)
    for axes in (("tensor", "pipeline"), ("expertTensor", "expert", "pipeline"), ("copies", "expert")):
        if world % math.prod(int(_number(cut, axis, 1)) for axis in axes):
            cut.clear()
    if _number(cut, "pipeline", 1) == 1 or _number(cut, "virtualPipeline", 1) != 2:
        cut.pop("virtualPipeline", None)
    batch = _section(train, "batch")
    batch.pop("dynamicMicroBatches", None)
    batch.pop("sharePrompts", None)
    batch |= {"microBatchSequences": 1, "promptsPerUpdate": world}


def _mend_rollout(pool: Document, train_nodes: int, devices: int, mode: str) -> None:
    if mode == "Colocated":
        pool["nodes"] = train_nodes
        pool.pop("autoscale", None)
    nodes = int(_number(pool, "nodes", 1))
    if devices % int(_number(pool, "tensorParallel", 1)):
        del pool["tensorParallel"]
    if nodes < 2 or devices == int(_number(pool, "tensorParallel", 1)):
        pool.pop("stragglerLane", None)
    elif "stragglerLane" in pool:
        _section(pool, "stragglerLane").update(nodes=1, tensorParallel=devices, afterTokens=1)
    if pool.get("engine") != "VLLM":
        pool.pop("vllm", None)
    elif _number(pool, "topP", 1) < 1 or _number(pool, "minP", 0) > 0 or _number(pool, "topK", 0) > 0:
        pool["topK"] = 20
    if "maxBatchedTokens" in pool.get("vllm", {}):
        pool["vllm"]["maxBatchedTokens"] = 8192
        pool["maxSequencesPerReplica"] = 64
    # The lane is a part of the pool.
    pool["minNodes"], pool["maxNodes"] = 2 if "stragglerLane" in pool else 1, max(8, nodes)
