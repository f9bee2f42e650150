"""Each check with a spec that fails it, by path, and with one that passes."""

import pytest

from qwen35_trainer.manifest import ManifestError, TrainingSpec, check, check_new, parse_manifest, parse_spec
from qwen35_trainer.manifest.checks import CHECKS as NEEDED
from qwen35_trainer.manifest.checks import NEW_TRAINING_CHECKS

CHECKS = (*NEEDED, *NEW_TRAINING_CHECKS)
FILES = [{"name": "math", "files": {"paths": ["math.jsonl"]}}]
GYM = {"task": "chain_sum", "size": 8}
EIGHT = {"accelerator.devicesPerNode": 8, "train.batch.promptsPerUpdate": 8}
MOE = {"model.source.random.experts": 4}
LANE = {"nodes": 1, "tensorParallel": 2, "afterTokens": 64}
SFT = {"mode": "SFT", "rollout": None, "rewards": []}
VLLM = {"engine": "VLLM"}

# What is wrong, the path it is reported at, and a like spec that is right.
CASES = {
    "sft has no rollout": ({**SFT, "rollout": {}}, "spec.rollout", SFT),
    "sft has no rewards": ({**SFT, "rewards": [{"type": "Math"}]}, "spec.rewards", SFT),
    "rollout is needed": ({"rollout": None}, "spec.rollout", {}),
    "rewards are needed": ({"rewards": []}, "spec.rewards", {}),
    "group of one": ({"algorithm.groupSize": 1}, "spec.algorithm.groupSize", {"algorithm.groupSize": 2}),
    "group of one, Dr. GRPO": (
        {"algorithm": {"groupSize": 1, "advantage": "DrGRPO"}},
        "spec.algorithm.groupSize",
        {"algorithm": {"groupSize": 1, "advantage": "ReinforcePlusPlus"}},
    ),
    "threshold above lag": (
        {"async": {"stalenessThreshold": 6.0}},
        "spec.async.stalenessThreshold",
        {"async": {"stalenessThreshold": 6.0, "maxVersionLag": 6}},
    ),
    "partial rollout without a window": (
        {"async": {"stalenessThreshold": 0, "partialRollout": True}},
        "spec.async.partialRollout",
        {"async": {"stalenessThreshold": 0}},
    ),
    "lag in colocated mode": (
        {"mode": "Colocated", "async": {"maxVersionLag": 2}},
        "spec.async.maxVersionLag",
        {"mode": "Colocated", "async": {"maxVersionLag": 0}},
    ),
    "threshold in colocated mode": (
        {"mode": "Colocated", "async": {"stalenessThreshold": 0.5}},
        "spec.async.stalenessThreshold",
        {"mode": "Colocated", "async": {"stalenessThreshold": 0, "batchesPerPublication": 2, "updatesPerBatch": 2}},
    ),
    "deadline policy in SFT": (
        {**SFT, "async": {"onMissedDeadline": "Discard"}},
        "spec.async.onMissedDeadline",
        {**SFT, "async": {"onMissedDeadline": "Wait"}},
    ),
    "adaptive dispatch in colocated mode": (
        {"mode": "Colocated", "async": {"adaptiveDispatch": True}},
        "spec.async.adaptiveDispatch",
        {"mode": "Colocated", "async": {"adaptiveDispatch": False}},
    ),
    "a filter that leaves nothing": (
        {"algorithm": {"advantage": "ReinforcePlusPlus", "groupSize": 1, "dynamicSampling": True}},
        "spec.algorithm.dynamicSampling",
        {"algorithm": {"advantage": "ReinforcePlusPlus", "groupSize": 2, "dynamicSampling": True}},
    ),
    "partial rollout in colocated mode": (
        {"mode": "Colocated", "async": {"partialRollout": True}},
        "spec.async.partialRollout",
        {"mode": "Colocated", "async": {"partialRollout": False}},
    ),
    "replay of experts that no rollout chose": (
        {**SFT, "train.router.replay": True},
        "spec.train.router.replay",
        {"train.router.replay": True},
    ),
    "colocated pools of two sizes": (
        {"mode": "Colocated", "rollout.nodes": 2},
        "spec.rollout.nodes",
        {"mode": "Colocated", "rollout.nodes": 2, "train.nodes": 2},
    ),
    "dense layers": ({"train.parallelism.tensor": 3}, "spec.train.parallelism", {"train.parallelism.tensor": 2}),
    "experts": (
        {**MOE, "train.parallelism.expert": 4},
        "spec.train.parallelism",
        {**MOE, "train.parallelism.expert": 2},
    ),
    "experts of Megatron": (
        {**MOE, "train.engine": "Megatron", "train.parallelism.expert": 4},
        "spec.train.parallelism",
        {**MOE, "train.engine": "Megatron", "train.parallelism.expert": 2},
    ),
    "expert tensor without experts is not used": (
        {**MOE, "train.engine": "Megatron", "train.parallelism": {"expert": 2, "expertTensor": 3}},
        "spec.train.parallelism",
        {**MOE, "train.engine": "Megatron", "train.parallelism": {"expert": 1, "expertTensor": 3}},
    ),
    "experts of copies": (
        {**EIGHT, **MOE, "train.parallelism": {"copies": 4, "expert": 4}},
        "spec.train.parallelism",
        {**EIGHT, **MOE, "train.parallelism": {"copies": 2, "expert": 4}},
    ),
    "an expert mesh of a dense model": (
        {"train.parallelism.expert": 2},
        "spec.train.parallelism.expert",
        {"train.parallelism.expert": 1},
    ),
    "an expert mesh that does not divide the experts": (
        {"model.source.random.experts": 9, "train.parallelism.expert": 2},
        "spec.train.parallelism.expert",
        {"model.source.random.experts": 10, "train.parallelism.expert": 2},
    ),
    "copies": (
        {**EIGHT, "train.parallelism.copies": 3},
        "spec.train.parallelism",
        {**EIGHT, "train.parallelism.copies": 2},
    ),
    "copies and sequences": (
        {**EIGHT, "train.parallelism": {"copies": 8, "context": 2}},
        "spec.train.parallelism",
        {**EIGHT, "train.parallelism": {"copies": 4, "context": 2}},
    ),
    "copies of Megatron": (
        {**EIGHT, "train.parallelism.copies": 2, "train.engine": "Megatron"},
        "spec.train.parallelism.copies",
        {**EIGHT, "train.parallelism.copies": 2, "train.engine": "FSDP"},
    ),
    "virtual stages without stages": (
        {**EIGHT, "train.parallelism.virtualPipeline": 2},
        "spec.train.parallelism.virtualPipeline",
        {**EIGHT, "train.parallelism": {"virtualPipeline": 2, "pipeline": 2}},
    ),
    "virtual stages of a model with too few layers": (
        {**EIGHT, "train.parallelism": {"virtualPipeline": 4, "pipeline": 2}},
        "spec.train.parallelism.virtualPipeline",
        {**EIGHT, "train.parallelism": {"virtualPipeline": 2, "pipeline": 2}},
    ),
    "virtual stages that do not divide the layers": (
        {
            **EIGHT,
            "train.parallelism": {"virtualPipeline": 3, "pipeline": 2},
            "model.source": {"random": {"layers": 8}},
        },
        "spec.train.parallelism.virtualPipeline",
        {
            **EIGHT,
            "train.parallelism": {"virtualPipeline": 4, "pipeline": 2},
            "model.source": {"random": {"layers": 8}},
        },
    ),
    "heads of a sequence's devices": (
        {**EIGHT, "train.parallelism.context": 4},
        "spec.train.parallelism.context",
        {**EIGHT, "train.parallelism.context": 2},
    ),
    "gradients without parameters": (
        {"train.offload.gradients": True},
        "spec.train.offload.gradients",
        {"train.offload": {"gradients": True, "parameters": True}},
    ),
    "activations that are not computed again": (
        {"train.offload.activations": True},
        "spec.train.offload.activations",
        {"train": {"activationCheckpointing": True, "offload": {"activations": True}}},
    ),
    "activations of Megatron": (
        {"train": {"engine": "Megatron", "activationCheckpointing": True, "offload": {"activations": True}}},
        "spec.train.offload.activations",
        {"train": {"engine": "Megatron", "activationCheckpointing": True}},
    ),
    "gathered layers of Megatron": (
        {"train": {"engine": "Megatron", "reshardAfterForward": False}},
        "spec.train.reshardAfterForward",
        {"train": {"engine": "FSDP", "reshardAfterForward": False}},
    ),
    "batch": (
        {"train.batch.promptsPerUpdate": 3, "algorithm.groupSize": 3},
        "spec.train.batch",
        {"train.batch.promptsPerUpdate": 3, "algorithm.groupSize": 4},
    ),
    "micro-batches": (
        {"train.batch.microBatchSequences": 3},
        "spec.train.batch",
        {"train.batch.microBatchSequences": 4},
    ),
    "token budget": (
        {"train.batch": {"dynamicMicroBatches": True, "maxTokensPerDevice": 3071}},
        "spec.train.batch.maxTokensPerDevice",
        {"train.batch": {"dynamicMicroBatches": True, "maxTokensPerDevice": 3072}},
    ),
    "shared prompts of Megatron": (
        {"train.engine": "Megatron", "train.batch.sharePrompts": True},
        "spec.train.batch.sharePrompts",
        {"train.engine": "Megatron", "train.batch.sharePrompts": False},
    ),
    "shared prompts in padded rows": (
        {"train.batch": {"sharePrompts": True, "dynamicMicroBatches": True}},
        "spec.train.batch.sharePrompts",
        {"train.batch": {"sharePrompts": True, "dynamicMicroBatches": True, "removePadding": True}},
    ),
    "shared prompts of single samples": (
        {"train.batch": {"sharePrompts": True, "removePadding": True}},
        "spec.train.batch.sharePrompts",
        {"train.batch": {"sharePrompts": True, "removePadding": True, "microBatchSequences": 2}},
    ),
    "shared prompts of single examples": (
        {**SFT, "train.batch": {"sharePrompts": True, "removePadding": True}},
        "spec.train.batch.sharePrompts",
        {**SFT, "train.batch": {"removePadding": True}},
    ),
    "replica within a node": (
        {**EIGHT, "rollout.tensorParallel": 3},
        "spec.rollout.tensorParallel",
        {**EIGHT, "rollout.tensorParallel": 4},
    ),
    "replica over nodes": (
        {**EIGHT, "rollout": {"nodes": 3, "tensorParallel": 16}},
        "spec.rollout.tensorParallel",
        {**EIGHT, "rollout": {"nodes": 4, "tensorParallel": 16}},
    ),
    "the smallest pool has half a replica": (
        {**EIGHT, "rollout": {**VLLM, "nodes": 4, "minNodes": 3, "tensorParallel": 16}},
        "spec.rollout.minNodes",
        {**EIGHT, "rollout": {**VLLM, "nodes": 4, "minNodes": 2, "tensorParallel": 16}},
    ),
    "the largest pool has half a replica": (
        {**EIGHT, "rollout": {**VLLM, "nodes": 4, "maxNodes": 5, "tensorParallel": 16}},
        "spec.rollout.maxNodes",
        {**EIGHT, "rollout": {**VLLM, "nodes": 4, "maxNodes": 6, "tensorParallel": 16}},
    ),
    "replica of the lane": (
        {"rollout": {"nodes": 3, "stragglerLane": {**LANE, "tensorParallel": 4}}},
        "spec.rollout.stragglerLane.tensorParallel",
        {"rollout": {"nodes": 3, "stragglerLane": {**LANE, "tensorParallel": 4, "nodes": 2}}},
    ),
    "lane is the whole pool": (
        {"rollout": {"nodes": 1, "stragglerLane": LANE}},
        "spec.rollout.stragglerLane.nodes",
        {"rollout": {"nodes": 2, "stragglerLane": LANE}},
    ),
    "the smallest pool is the lane": (
        {"rollout": {"nodes": 3, "minNodes": 1, "stragglerLane": LANE}},
        "spec.rollout.minNodes",
        {"rollout": {"nodes": 3, "minNodes": 2, "stragglerLane": LANE}},
    ),
    "an option that is neither true nor false": (
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"enable_expert_parallel": "maybe"}}}},
        "spec.rollout.vllm.extraArguments.enable_expert_parallel",
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"enable_expert_parallel": "false"}}}},
    ),
    "a lane of replicas like the others": (
        {"rollout": {"engine": "VLLM", "nodes": 2, "tensorParallel": 2, "stragglerLane": LANE}},
        "spec.rollout.stragglerLane.tensorParallel",
        {"rollout": {"engine": "VLLM", "nodes": 2, "tensorParallel": 1, "stragglerLane": LANE}},
    ),
    "a lane for responses that are over": (
        {"rollout": {"nodes": 2, "stragglerLane": LANE}, "data.maxResponseTokens": 64},
        "spec.rollout.stragglerLane.afterTokens",
        {"rollout": {"nodes": 2, "stragglerLane": LANE}, "data.maxResponseTokens": 65},
    ),
    "a lane of Torch replicas on accelerators": (
        {"accelerator.profile": "NVIDIA", "rollout": {"nodes": 2, "stragglerLane": LANE}},
        "spec.rollout.stragglerLane",
        {"accelerator.profile": "NVIDIA", "rollout": {"engine": "VLLM", "nodes": 2, "stragglerLane": LANE}},
    ),
    "options of another engine": (
        {"rollout": {"engine": "Torch", "vllm": {"eager": True}}},
        "spec.rollout.vllm",
        {"rollout": {"engine": "VLLM", "vllm": {"eager": True}}},
    ),
    "a step without room for every sequence": (
        {"rollout": {"engine": "VLLM", "maxSequencesPerReplica": 256, "vllm": {"maxBatchedTokens": 255}}},
        "spec.rollout.vllm.maxBatchedTokens",
        {"rollout": {"engine": "VLLM", "maxSequencesPerReplica": 256, "vllm": {"maxBatchedTokens": 256}}},
    ),
    "an argument of vLLM with a field of its own": (
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"max_num_seqs": 8}}}},
        "spec.rollout.vllm.extraArguments.max_num_seqs",
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"block_size": 256}}}},
    ),
    "a scheduler of its own": (
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"scheduler_cls": "own.Scheduler"}}}},
        "spec.rollout.vllm.extraArguments.scheduler_cls",
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"async_scheduling": False}}}},
    ),
    "scheduling ahead on a CPU": (
        {
            "accelerator": {"profile": "CPU"},
            "rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"async_scheduling": True}}},
        },
        "spec.rollout.vllm.extraArguments.async_scheduling",
        {
            "accelerator": {"profile": "CPU"},
            "rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"async_scheduling": False}}},
        },
    ),
    "experts that move between devices": (
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"enable_eplb": True}}}},
        "spec.rollout.vllm.extraArguments.enable_eplb",
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"enable_expert_parallel": True}}}},
    ),
    "speculative decoding": (
        {"rollout": {"engine": "VLLM", "vllm": {"extraArguments": {"speculative_config": "mtp"}}}},
        "spec.rollout.vllm.extraArguments.speculative_config",
        {"rollout": {"engine": "VLLM"}},
    ),
    "settings of megatron-core for another engine": (
        {"train.overrideTransformerConfig": {"bias_activation_fusion": True}},
        "spec.train.overrideTransformerConfig",
        {"train.engine": "Megatron", "train.overrideTransformerConfig": {"bias_activation_fusion": True}},
    ),
    "a setting of megatron-core with a field of its own": (
        {"train.engine": "Megatron", "train.overrideTransformerConfig": {"tensor_model_parallel_size": 1}},
        "spec.train.overrideTransformerConfig.tensor_model_parallel_size",
        {"train.engine": "Megatron", "train.overrideTransformerConfig": {}},
    ),
    "unbounded top-p with vLLM": (
        {"rollout": {"engine": "VLLM", "topP": 0.9}},
        "spec.rollout.topK",
        {"rollout": {"engine": "VLLM", "topP": 0.9, "topK": 512}},
    ),
    "unbounded min-p with vLLM": (
        {"rollout": {"engine": "VLLM", "minP": 0.1}},
        "spec.rollout.topK",
        {"rollout": {"engine": "Torch", "minP": 0.1}},
    ),
    "too many candidates for vLLM": (
        {"rollout": {"engine": "VLLM", "topK": 513}},
        "spec.rollout.topK",
        {"rollout": {"engine": "Torch", "topK": 513}},
    ),
    "a temperature that vLLM raises": (
        {"rollout": {"engine": "VLLM", "temperature": 0.005}},
        "spec.rollout.temperature",
        {"rollout": {"engine": "VLLM", "temperature": 0.01}},
    ),
    "a temperature of evaluations that vLLM raises": (
        {"rollout": {"engine": "VLLM"}, "evaluation": {"temperature": 0.009}},
        "spec.evaluation.temperature",
        {"rollout": {"engine": "Torch"}, "evaluation": {"temperature": 0.009}},
    ),
    "a variable of nothing": (
        {"pods": {"env": [{"name": "KEY"}]}},
        "spec.pods.env[0]",
        {"pods": {"env": [{"name": "KEY", "value": "a"}]}},
    ),
    "a variable of two": (
        {"pods": {"env": [{"name": "KEY", "value": "a", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
        "spec.pods.env[0]",
        {"pods": {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
    ),
    "a variable of the operator": (
        {"pods": {"env": [{"name": "QWEN35_POOL", "value": "a"}]}},
        "spec.pods.env[0].name",
        {"pods": {"env": [{"name": "MY_POOL", "value": "a"}]}},
    ),
    "autoscaling shared nodes": (
        {"mode": "Colocated", "rollout.autoscale": {}},
        "spec.rollout.autoscale",
        {"mode": "FullyAsync", "rollout.autoscale": {}},
    ),
    "fewest nodes": ({"rollout.minNodes": 2}, "spec.rollout.minNodes", {"rollout.minNodes": 1}),
    "most nodes": (
        {"rollout": {"nodes": 3, "maxNodes": 2}},
        "spec.rollout.maxNodes",
        {"rollout": {"nodes": 3, "maxNodes": 3}},
    ),
    "clip": ({"algorithm.loss.clipLow": 1}, "spec.algorithm.loss.clipLow", {"algorithm.loss.clipLow": 0.9}),
    "overlong buffer": (
        {"algorithm.overlongPenalty": {"bufferTokens": 1000}, "data.maxResponseTokens": 999},
        "spec.algorithm.overlongPenalty.bufferTokens",
        {"algorithm.overlongPenalty": {"bufferTokens": 1000}, "data.maxResponseTokens": 1000},
    ),
    "divergence and correction": (
        {"algorithm.loss": {"type": "DPPOBinaryTV", "maxDivergence": 0.2}},
        "spec.algorithm.correction.type",
        {"algorithm": {"loss": {"type": "DPPOBinaryTV", "maxDivergence": 0.2}, "correction": {"type": "None"}}},
    ),
    "divergence of another loss": (
        {"algorithm.loss": {"type": "CISPO", "maxDivergence": 0.2}},
        "spec.algorithm.loss.maxDivergence",
        {"algorithm.loss": {"type": "CISPO", "clipLow": 0.9}},
    ),
    "a soft gate where every ratio is 1": (
        {"algorithm.loss": {"type": "SAPO"}},
        "spec.algorithm.correction.type",
        {"algorithm": {"loss": {"type": "SAPO", "tauNegative": 2.0}, "correction": {"type": "None"}}},
    ),
    "a soft gate with one update per batch": (
        {"algorithm": {"loss": {"type": "SAPO"}, "correction": {"type": "DecoupledPPO"}}},
        "spec.algorithm.correction.type",
        {
            "algorithm": {"loss": {"type": "SAPO"}, "correction": {"type": "DecoupledPPO"}},
            "async": {"updatesPerBatch": 2},
        },
    ),
    "reward coefficient of one penalty": (
        {"algorithm.kl": {"placement": "Loss", "rewardCoefficient": 0.02}},
        "spec.algorithm.kl.rewardCoefficient",
        {"algorithm.kl": {"placement": "LossAndReward", "rewardCoefficient": 0.02}},
    ),
    "reward estimator of one penalty": (
        {"algorithm.kl": {"placement": "Reward", "rewardEstimator": "K1"}},
        "spec.algorithm.kl.rewardEstimator",
        {"algorithm.kl": {"placement": "LossAndReward", "rewardEstimator": "K1"}},
    ),
    "nothing to adapt": (
        {"algorithm.kl": {"adaptive": {}}},
        "spec.algorithm.kl.adaptive",
        {"algorithm.kl": {"placement": "Reward", "adaptive": {}}},
    ),
    "adaptive coefficient of 0": (
        {"algorithm.kl": {"placement": "Loss", "coefficient": 0, "adaptive": {}}},
        "spec.algorithm.kl.coefficient",
        {"algorithm.kl": {"placement": "LossAndReward", "coefficient": 0, "rewardCoefficient": 0.1, "adaptive": {}}},
    ),
    "floor and cap": (
        {"algorithm.correction": {"type": "IcePop", "floor": 2.0}},
        "spec.algorithm.correction.floor",
        {"algorithm.correction": {"type": "TokenTIS", "floor": 2.0}},
    ),
    "function is missing": (
        {"rewards": [{"type": "Function"}]},
        "spec.rewards[0].function",
        {"rewards": [{"type": "Function", "function": "pack.module:name"}]},
    ),
    "function of another type": (
        {"rewards": [{"type": "Math", "function": "a:b"}]},
        "spec.rewards[0].function",
        {"rewards": [{"type": "Math"}]},
    ),
    "function of a loss is missing": (
        {"algorithm.loss": {"type": "Function"}},
        "spec.algorithm.loss.function",
        {"algorithm.loss": {"type": "Function", "function": "losses:mine"}},
    ),
    "function of another loss": (
        {"algorithm.loss": {"function": "losses:mine"}},
        "spec.algorithm.loss.function",
        {"algorithm.loss": {}},
    ),
    "function of an advantage is missing": (
        {"algorithm.advantage": "Function"},
        "spec.algorithm.advantageFunction",
        {"algorithm": {"advantage": "Function", "advantageFunction": "advantages:mine"}},
    ),
    "function of another advantage": (
        {"algorithm.advantageFunction": "advantages:mine"},
        "spec.algorithm.advantageFunction",
        {"algorithm": {}},
    ),
    "extract of another type": (
        {"rewards": [{"type": "Gym", "extract": "x"}]},
        "spec.rewards[0].extract",
        {"rewards": [{"type": "ExactMatch", "extract": "x"}]},
    ),
    "no gym to score": (
        {"data.train": FILES},
        "spec.rewards[0].type",
        {"data.train": FILES, "data.validation": [{"name": "gym", "gym": GYM}]},
    ),
    "no model source": ({"model.source": {}}, "spec.model.source", {"model.source": {"path": "/models/x"}}),
    "two model sources": (
        {"model.source": {"path": "/x", "random": {}}},
        "spec.model.source",
        {"model.source": {"persistentVolumeClaim": {"claimName": "models"}}},
    ),
    "heads": (
        {"model.source.random.attentionHeads": 3},
        "spec.model.source.random.attentionHeads",
        {"model.source.random.attentionHeads": 6},
    ),
    "value heads": (
        {"model.source.random.linearValueHeads": 3},
        "spec.model.source.random.linearValueHeads",
        {"model.source.random.linearValueHeads": 4},
    ),
    "experts per token": (
        {"model.source.random.experts": 1},
        "spec.model.source.random.expertsPerToken",
        {"model.source.random.experts": 2},
    ),
    "characters": (
        {"model.source.random.characters": "abca"},
        "spec.model.source.random.characters",
        {"model.source.random.characters": "abc"},
    ),
    "no data source": (
        {"data.train": [{"name": "a"}, {"name": "b", "gym": GYM}]},
        "spec.data.train[0]",
        {"data.train": [{"name": "b", "gym": GYM}]},
    ),
    "source of two kinds": (
        {"data.train": [{**FILES[0], "gym": GYM}]},
        "spec.data.train[0]",
        {"data.train": [{"name": "b", "gym": GYM}]},
    ),
    "source names": (
        {"data.validation": [{"name": "sums", "gym": GYM}]},
        "spec.data.validation[0].name",
        {"data.validation": [{"name": "others", "gym": GYM}]},
    ),
    "reward names": (
        {"rewards": [{"type": "Gym"}, {"type": "Math", "name": "Gym"}]},
        "spec.rewards[1].name",
        {"rewards": [{"type": "Gym"}, {"type": "Gym", "name": "again"}]},
    ),
    "rule names": (
        {"failurePolicy.rules": [{"name": "a", "action": "Fail"}, {"name": "a", "action": "Restart"}]},
        "spec.failurePolicy.rules[1].name",
        {"failurePolicy.rules": [{"name": "a", "action": "Fail"}, {"name": "b", "action": "Restart"}]},
    ),
    "two storages": (
        {"checkpoint.storage": {"path": "/c", "persistentVolumeClaim": {"claimName": "c"}}},
        "spec.checkpoint.storage",
        {"checkpoint.storage": {"path": "/c"}},
    ),
    "a transport without its folder": (
        {"publication.transport": "Folder"},
        "spec.publication.folder",
        {"publication.folder": "/publications"},
    ),
    "no storage": ({"checkpoint.storage": {}}, "spec.checkpoint.storage", {"checkpoint.storage": None}),
    "reward pattern": (
        {"rewards": [{"type": "Math", "extract": "(a"}]},
        "spec.rewards[0].extract",
        {"rewards": [{"type": "Math", "extract": "(a)"}]},
    ),
    "rule pattern": (
        {"failurePolicy.rules": [{"name": "a", "action": "Fail", "onMessagePattern": "*"}]},
        "spec.failurePolicy.rules[0].onMessagePattern",
        {"failurePolicy.rules": [{"name": "a", "action": "Fail", "onMessagePattern": ".*"}]},
    ),
    "rule pattern that RE2 does not know": (
        {"failurePolicy.rules": [{"name": "a", "action": "Fail", "onMessagePattern": "(?P<a>x)\\1"}]},
        "spec.failurePolicy.rules[0].onMessagePattern",
        {"failurePolicy.rules": [{"name": "a", "action": "Fail", "onMessagePattern": "(?P<a>x)x"}]},
    ),
    "rule pattern that needs too much memory": (
        {"failurePolicy.rules": [{"name": "a", "action": "Fail", "onMessagePattern": "((\\pL{1,1000}){1,1000})"}]},
        "spec.failurePolicy.rules[0].onMessagePattern",
        {"failurePolicy.rules": [{"name": "a", "action": "Fail", "onMessagePattern": "\\pL{1,3}"}]},
    ),
}


def problems(document, changes):
    return parse_spec(document(changes)["spec"])[1]


@pytest.mark.parametrize(("wrong", "path", "right"), CASES.values(), ids=CASES)
def test_what_does_not_fit_is_named_by_its_path(document, wrong, path, right):
    assert [problem.path for problem in problems(document, wrong)] == [path]


@pytest.mark.parametrize(("wrong", "path", "right"), CASES.values(), ids=CASES)
def test_what_fits_passes(document, wrong, path, right):
    assert problems(document, right) == []


@pytest.mark.parametrize(("wrong", "path", "right"), CASES.values(), ids=CASES)
def test_every_problem_is_a_sentence_with_a_fix(document, wrong, path, right):
    for problem in problems(document, wrong):
        assert problem.message.endswith(".")
        assert problem.fix.endswith(".")


def test_every_check_has_a_failing_case(document):
    failed = {
        function.__name__
        for wrong, _, _ in CASES.values()
        for function, _ in CHECKS
        if list(function(TrainingSpec.model_validate(document(wrong)["spec"])))
    }
    assert failed == {function.__name__ for function, _ in CHECKS}


@pytest.mark.parametrize(("function", "reads"), CHECKS, ids=[function.__name__ for function, _ in CHECKS])
def test_a_check_reads_only_the_sections_it_declares(document, function, reads):
    attributes = {"async": "async_"}
    for wrong, _, _ in CASES.values():
        whole = TrainingSpec.model_validate(document(wrong)["spec"])
        declared = {attributes.get(name, name): getattr(whole, attributes.get(name, name)) for name in reads}
        # model_construct fills in defaults; deleting them makes any other read fail.
        part = TrainingSpec.model_construct(**declared)
        for name in TrainingSpec.model_fields.keys() - declared.keys():
            part.__dict__.pop(name, None)
        assert list(function(part)) == list(function(whole))


def test_a_training_that_has_begun_is_not_refused_for_what_an_earlier_release_accepted(document):
    """A new training with the same spec is, with the same problems in `check_new` and `check`."""
    refused = []
    for name, (wrong, _, _) in CASES.items():
        written = document(wrong)["spec"]
        spec, begun = parse_spec(written, new=False)
        new = parse_spec(written)[1]
        assert new == [*begun, *check_new(spec)]
        if not begun:
            refused.append(name)
            manifest = document(wrong)
            assert parse_manifest(manifest, new=False).spec == spec
            with pytest.raises(ManifestError):
                parse_manifest(manifest)
    assert refused == [
        "the smallest pool is the lane",
        "a lane of replicas like the others",
        "a lane for responses that are over",
        "a lane of Torch replicas on accelerators",
        "a temperature that vLLM raises",
        "a temperature of evaluations that vLLM raises",
        "a soft gate where every ratio is 1",
        "a soft gate with one update per batch",
        "rule pattern",
        "rule pattern that RE2 does not know",
        "rule pattern that needs too much memory",
    ]


def test_problems_of_the_lane_name_the_value_and_the_fix(document):
    lane = {"rollout": {"nodes": 2, "tensorParallel": 2, "engine": "VLLM", "stragglerLane": LANE}}
    size, limit = problems(document, lane | {"data.maxResponseTokens": 32})
    assert (size.message, size.fix) == (
        "2 is not above rollout.tensorParallel 2, so the lane is not faster.",
        "Use more than 2, or remove stragglerLane.",
    )
    assert (limit.message, limit.fix) == (
        "64 is not below data.maxResponseTokens 32: responses end before they could move.",
        "Use less than 32, or remove stragglerLane.",
    )


def test_checks_of_unreadable_sections_are_left_out(document):
    spec = TrainingSpec.model_validate(document({"train.parallelism.tensor": 3})["spec"])
    assert check(spec)
    assert check(spec, without={"train"}) == []


def test_a_taken_name_gets_a_free_one(document):
    rewards = [{"type": "Gym"}, {"type": "Math", "name": "Gym-2"}, {"type": "Math", "name": "Gym"}]
    assert [problem.fix for problem in problems(document, {"rewards": rewards})] == ["Name it Gym-3."]
