"""The CEL rules of the CRD, by path in its schema. The API server evaluates them, so there is no admission webhook.

The rules express the checks of `qwen35_trainer.manifest.checks` that CEL can express, and declare which fields are
immutable: some always, others unless the training is suspended. An admitted change of another field is either taken
over by the running attempt, or ends it and starts a new attempt (`LIVE_FIELDS` in desired/spec_hash.py). A test keeps
the rules and the Python models in agreement:
`test_every_rule_of_the_definition_refuses_what_the_models_refuse` in tests/controlplane/test_admission.py. The API
server must refuse each spec that fails a check of the models, and admit the same spec when it is corrected. Each rule
about new trainings must refuse at least one spec. `KNOWN` in that file lists the checks that CEL cannot express.

Rules follow these conventions:

* Fields with a default always exist, so only optional fields are tested with has(). A null in an optional field counts
  as absent, because the API server removes it before it evaluates rules.
* Only sections without a default have rules. If the default of a section is {}, the API server evaluates the rules of
  the section on {}, before the section's fields get their defaults.
* A rule that is younger than the first release ratchets (checks.NEW_TRAINING_CHECKS in the manifest): the rule allows
  every change of an object that already broke the rule, so that an older training can still be suspended or resized.
* Messages with values use format(). If they joined strings with +, the API server could not limit the estimated cost,
  and would refuse the rule.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qwen35_trainer.manifest.contents import DIVERGENCE_MASKED
from qwen35_trainer.manifest.modes import GROUP_RELATIVE
from qwen35_trainer.manifest.rollout import MAX_VLLM_TOP_K, MIN_VLLM_TEMPERATURE


@dataclass(frozen=True)
class Rule:
    """One validation rule of the CRD: an entry of x-kubernetes-validations.

    rule: a CEL expression that is true for a valid object. message: the error message. expression: a CEL expression
    that computes a message with the object's values; if it is None or fails, `message` is shown. field: path of the
    invalid field, relative to the section that has the rule; None for the section itself. reason: the kind of the
    error. ratchets: whether an object that already breaks the rule may still be changed, because the object can be
    older than the rule.
    """

    rule: str
    message: str
    expression: str | None = None
    field: str | None = None
    reason: str = "FieldValueInvalid"
    ratchets: bool = False

    def render(self) -> dict[str, str | bool]:
        """Return the rule in the form of an entry of x-kubernetes-validations."""
        entry: dict[str, str | bool] = {"rule": self.rule, "message": self.message, "reason": self.reason}
        if self.ratchets:
            before = re.sub(r"\bself\b", "oldSelf.value()", self.rule)
            entry |= {"rule": f"({self.rule}) || (oldSelf.hasValue() && !({before}))", "optionalOldSelf": True}
        optional = {"messageExpression": self.expression, "fieldPath": self.field}
        return entry | {key: value for key, value in optional.items() if value is not None}


WORLD = "self.train.nodes * self.accelerator.devicesPerNode"
DENSE = "(self.train.parallelism.tensor * self.train.parallelism.pipeline * self.train.parallelism.context)"
EXPERT = "(self.train.parallelism.expertTensor * self.train.parallelism.expert * self.train.parallelism.pipeline)"
COPIES_OF_EXPERTS = "(self.train.parallelism.copies * self.train.parallelism.expert)"
COPIES = "(self.train.parallelism.copies * self.train.parallelism.context)"
VIRTUAL = "self.train.parallelism.virtualPipeline"
GROUP = "(self.mode == 'SFT' ? 1 : self.algorithm.groupSize)"
MAX_SEQUENCE_TOKENS = "self.data.maxPromptTokens + self.data.maxResponseTokens"
STALENESS_THRESHOLD = "(has(self.async.stalenessThreshold) ? self.async.stalenessThreshold : 0.5)"
MAX_VERSION_LAG = "(has(self.async.maxVersionLag) ? self.async.maxVersionLag : 4)"
LANE_NODES = "(has(self.rollout.stragglerLane) ? self.rollout.stragglerLane.nodes : 0)"
KL = "self.algorithm.kl"
REWARD_NAME = "(has({0}.name) ? {0}.name : {0}.type)"


def _message(message: str, *values: str) -> str:
    """Return a CEL expression that computes a message.

    values: CEL expressions of the integers that replace each %d of `message`, in order.
    """
    return f"'{message}'.format([{', '.join(values)}])"


def _cut(axes: tuple[str, ...], product: str, unless: str = "") -> Rule:
    return Rule(
        f"{unless}({WORLD}) % {product} == 0",
        f"{' × '.join(axes)} must divide train.nodes × accelerator.devicesPerNode.",
        _message(
            f"{' × '.join(f'{axis} %d' for axis in axes)} = %d does not divide %d nodes × %d devices = %d. "
            "Change one of them.",
            *(f"self.train.parallelism.{axis}" for axis in axes),
            product,
            *("self.train.nodes", "self.accelerator.devicesPerNode", WORLD),
        ),
        ".train.parallelism",
    )


def _fits(pool: str, nodes: str) -> Rule:
    size, devices = f"{pool}.tensorParallel", "self.accelerator.devicesPerNode"
    return Rule(
        f"!has({pool}) || ({size} <= {devices} ? {devices} % {size} == 0 : "
        f"{size} % {devices} == 0 && ({nodes}) % ({size} / {devices}) == 0)",
        "tensorParallel must divide accelerator.devicesPerNode, or be whole nodes that divide the pool.",
        _message(
            "tensorParallel %d does not fit %d nodes × %d devices: a replica is a whole part of a node, or whole nodes "
            "that divide the pool.",
            *(size, nodes, devices),
        ),
        f"{pool.removeprefix('self')}.tensorParallel",
    )


def _whole_replicas(field: str) -> Rule:
    """Return the rule that a limit of the rollout pool leaves no part of a replica of several nodes.

    field: minNodes or maxNodes.
    """
    nodes, size, devices = f"self.rollout.{field}", "self.rollout.tensorParallel", "self.accelerator.devicesPerNode"
    return Rule(
        f"!has(self.rollout) || !has({nodes}) || self.rollout.engine != 'VLLM' || {size} <= {devices} || "
        f"{nodes} <= {LANE_NODES} || ({nodes} - {LANE_NODES}) % ({size} / {devices}) == 0",
        f"{field} must leave no part of a replica of several nodes.",
        _message(
            f"{field} %d leaves a part of a replica: with rollout.tensorParallel %d, each has %d nodes.",
            *(nodes, size, f"{size} / {devices}"),
        ),
        f".rollout.{field}",
    )


def _one_of(*options: str) -> Rule:
    tests = ", ".join(f"has(self.{option})" for option in options)
    return Rule(f"[{tests}].exists_one(given, given)", f"Write exactly one of {', '.join(options)}.")


def _fixed(what: str) -> Rule:
    message = f"{what} cannot change during a training. Create a new Qwen35Training instead."
    return Rule("self == oldSelf", message, reason="FieldValueForbidden")


def _suspended_option(field: str) -> Rule:
    """Return the rule that an optional section of spec.rollout can change only while the training is suspended.

    field: the name of the section.
    """
    new, old = f"self.rollout.{field}", f"oldSelf.rollout.{field}"
    return Rule(
        "self.suspend || oldSelf.suspend || !has(self.rollout) || !has(oldSelf.rollout) || "
        f"(has({new}) == has({old}) && (!has({new}) || {new} == {old}))",
        f"rollout.{field} can change only while the training is suspended. Set suspend: true, change it, then set suspend: "
        "false.",
        field=f".rollout.{field}",
        reason="FieldValueForbidden",
    )


def _suspended(section: str, *fields: str) -> Rule:
    """Return the rule that a section of spec can change only while the training is suspended.

    Without `fields`, the rule covers the whole section, which every spec must have. With `fields`, the rule covers
    these fields of a section that may be absent.
    """
    pairs = [f"self.{section}.{field} == oldSelf.{section}.{field}" for field in fields]
    same = f"self.{section} == oldSelf.{section}"
    if fields:
        same = f"!has(self.{section}) || !has(oldSelf.{section}) || ({' && '.join(pairs)})"
    what = f"{', '.join(fields)} of {section}" if fields else section
    return Rule(
        f"self.suspend || oldSelf.suspend || {same}",
        f"{what} can change only while the training is suspended. Set suspend: true, change it, then set suspend: false.",
        field=f".{section}",
        reason="FieldValueForbidden",
    )


def _needs_window(field: str, neutral: str) -> Rule:
    return Rule(
        f"self.mode == 'FullyAsync' || !has(self.async.{field}) || self.async.{field} == {neutral}",
        f"{field} has an effect only in mode FullyAsync. Remove it, or use mode FullyAsync.",
        field=f".async.{field}",
    )


MODES = (
    Rule("self.mode != 'SFT' || !has(self.rollout)", "mode SFT has no rollout pool. Remove rollout.", field=".rollout"),
    Rule(
        "self.mode == 'SFT' || has(self.rollout)", "This mode needs rollout. Add rollout: {nodes: 1}.", field=".rollout"
    ),
    Rule("self.mode != 'SFT' || size(self.rewards) == 0", "mode SFT has no rewards. Remove them.", field=".rewards"),
    Rule(
        "self.mode != 'SFT' || !self.train.router.replay",
        "In mode SFT no rollout chooses experts. Remove train.router.replay.",
        field=".train.router.replay",
    ),
    Rule("self.mode == 'SFT' || size(self.rewards) > 0", "This mode needs at least one reward.", field=".rewards"),
    Rule(
        "(self.algorithm.loss.type == 'Function') == has(self.algorithm.loss.__function__)",
        "A loss of type Function needs function: module:name, and no other loss has it.",
        field=".algorithm.loss.function",
    ),
    Rule(
        "(self.algorithm.advantage == 'Function') == has(self.algorithm.advantageFunction)",
        "Advantage Function needs advantageFunction: module:name, and no other advantage has it.",
        field=".algorithm.advantageFunction",
    ),
    Rule(
        f"self.mode == 'SFT' || !(self.algorithm.advantage in {list(GROUP_RELATIVE)}) || self.algorithm.groupSize >= 2",
        "This advantage compares the samples of a prompt: groupSize must be at least 2.",
        field=".algorithm.groupSize",
    ),
    Rule(
        "self.mode == 'SFT' || !self.algorithm.dynamicSampling || self.algorithm.groupSize >= 2",
        "A single reward never differs: dynamicSampling needs groupSize of at least 2.",
        field=".algorithm.dynamicSampling",
    ),
    Rule(
        f"self.mode != 'FullyAsync' || {STALENESS_THRESHOLD} <= double({MAX_VERSION_LAG})",
        "stalenessThreshold must be at most maxVersionLag.",
        "'stalenessThreshold %s is above maxVersionLag %s: groups would start after their deadline. Lower it, or "
        f"raise maxVersionLag.'.format([string({STALENESS_THRESHOLD}), string({MAX_VERSION_LAG})])",
        ".async.stalenessThreshold",
    ),
    Rule(
        f"self.mode != 'FullyAsync' || {STALENESS_THRESHOLD} > 0.0 || !has(self.async.partialRollout) || !self.async.partialRollout",
        "partialRollout has no effect with stalenessThreshold 0. Remove it, or raise stalenessThreshold.",
        field=".async.partialRollout",
    ),
    _needs_window("stalenessThreshold", "0.0"),
    _needs_window("maxVersionLag", "0"),
    _needs_window("onMissedDeadline", "'Wait'"),
    _needs_window("partialRollout", "false"),
    _needs_window("adaptiveDispatch", "false"),
    Rule(
        "self.mode != 'Colocated' || !has(self.rollout) || self.rollout.nodes == self.train.nodes",
        "In mode Colocated the pools share their nodes: rollout.nodes must be train.nodes.",
        field=".rollout.nodes",
    ),
    Rule(
        "self.mode != 'Colocated' || !has(self.rollout) || !has(self.rollout.autoscale)",
        "In mode Colocated the pools share their nodes: there is nothing to autoscale. Remove autoscale.",
        field=".rollout.autoscale",
    ),
)

LAYOUT = (
    _cut(("tensor", "pipeline", "context"), DENSE),
    _cut(
        ("expertTensor", "expert", "pipeline"),
        EXPERT,
        unless="self.train.engine == 'FSDP' || self.train.parallelism.expert == 1 || ",
    ),
    _cut(
        ("copies", "expert"),
        COPIES_OF_EXPERTS,
        unless="self.train.engine != 'FSDP' || self.train.parallelism.expert == 1 || ",
    ),
    Rule(
        "!has(self.model.source.random) || self.train.parallelism.expert == 1 || (self.model.source.random.experts > 0 && "
        "self.model.source.random.experts % self.train.parallelism.expert == 0)",
        "expert must divide the experts of a layer, and be 1 for a dense model.",
        field=".train.parallelism.expert",
    ),
    _cut(
        ("copies", "context"),
        COPIES,
        unless="self.train.engine != 'FSDP' || self.train.parallelism.copies == 1 || ",
    ),
    Rule(
        "self.train.engine == 'FSDP' || self.train.parallelism.copies == 1",
        "copies has no effect with this engine, whose copies follow from the other degrees. Remove it, or use engine FSDP.",
        field=".train.parallelism.copies",
    ),
    Rule(
        f"{VIRTUAL} == 1 || self.train.parallelism.pipeline > 1",
        "Virtual stages need pipeline stages, and pipeline is 1. Set virtualPipeline to 1, or pipeline to at least 2.",
        field=".train.parallelism.virtualPipeline",
    ),
    Rule(
        f"!has(self.model.source.random) || {VIRTUAL} == 1 || self.train.parallelism.pipeline == 1 || "
        f"(self.model.source.random.layers % {VIRTUAL} == 0 && "
        f"self.model.source.random.layers >= {VIRTUAL} * self.train.parallelism.pipeline)",
        "virtualPipeline must divide the model's layers, and leave at least one layer for each virtual stage.",
        field=".train.parallelism.virtualPipeline",
    ),
    Rule(
        "!has(self.model.source.random) || ["
        "self.model.source.random.attentionHeads, self.model.source.random.linearKeyHeads, "
        "self.model.source.random.linearValueHeads].all(heads, heads % self.train.parallelism.context == 0)",
        "context must divide attentionHeads, linearKeyHeads and linearValueHeads: each device takes whole heads.",
        field=".train.parallelism.context",
    ),
    Rule(
        "self.train.engine != 'FSDP' || !self.train.offload.gradients || self.train.offload.parameters",
        "FSDP keeps gradients where the parameters are. Set offload.parameters to true, or gradients to false.",
        field=".train.offload.gradients",
    ),
    Rule(
        "!self.train.offload.activations || (self.train.engine == 'FSDP' && self.train.activationCheckpointing)",
        "Only FSDP offloads activations, and only with train.activationCheckpointing. Set that to true, or activations to false.",
        field=".train.offload.activations",
    ),
    Rule(
        "self.train.engine == 'FSDP' || self.train.reshardAfterForward",
        "reshardAfterForward has no effect with this engine, which gathers no parameters of layers. Remove it, or use engine FSDP.",
        field=".train.reshardAfterForward",
    ),
    Rule(
        f"self.train.batch.dynamicMicroBatches || ({WORLD}) % {DENSE} != 0 || "
        f"(self.train.batch.promptsPerUpdate * {GROUP}) % (({WORLD}) / {DENSE} * self.train.batch.microBatchSequences)"
        " == 0",
        "promptsPerUpdate × groupSize must divide over data-parallel ranks × microBatchSequences.",
        _message(
            "promptsPerUpdate %d × groupSize %d does not divide over %d data-parallel ranks × microBatchSequences %d. "
            "Change one of them.",
            *("self.train.batch.promptsPerUpdate", GROUP, f"({WORLD}) / {DENSE}"),
            "self.train.batch.microBatchSequences",
        ),
        ".train.batch",
    ),
    Rule(
        "!self.train.batch.sharePrompts || (self.train.engine == 'FSDP' && self.mode != 'SFT' && "
        "self.train.batch.removePadding && "
        "(self.train.batch.dynamicMicroBatches || self.train.batch.microBatchSequences > 1))",
        "sharePrompts needs engine FSDP, a mode with groups, removePadding, and dynamicMicroBatches or microBatchSequences of at "
        "least 2.",
        field=".train.batch.sharePrompts",
    ),
    Rule(
        f"!self.train.batch.dynamicMicroBatches || {MAX_SEQUENCE_TOKENS} <= "
        "self.train.batch.maxTokensPerDevice * self.train.parallelism.context",
        "maxTokensPerDevice × context must hold maxPromptTokens + maxResponseTokens.",
        field=".train.batch.maxTokensPerDevice",
    ),
    _fits("self.rollout", f"self.rollout.nodes - {LANE_NODES}"),
)
# A rule of the lane needs its own path; has() of a nested field requires a test of its parent first.
_lane = _fits("self.rollout.stragglerLane", "self.rollout.stragglerLane.nodes")
LANE = (
    Rule(f"!has(self.rollout) || {_lane.rule}", _lane.message, _lane.expression, _lane.field),
    _whole_replicas("minNodes"),
    _whole_replicas("maxNodes"),
)

VALUES = (
    Rule(
        "self.publication.transport != 'Folder' || has(self.publication.folder)",
        "The transport Folder needs publication.folder: a path on a volume that both pools mount. Name one, or set "
        "publication.transport to Auto.",
        field=".publication.folder",
    ),
    Rule(
        "self.algorithm.loss.clipLow < 1.0",
        "clipLow must be below 1, or no ratio is ever clipped.",
        field=".algorithm.loss.clipLow",
    ),
    Rule(
        "!has(self.rollout) || !has(self.rollout.stragglerLane) || "
        "self.rollout.stragglerLane.afterTokens < self.data.maxResponseTokens",
        "stragglerLane.afterTokens must be below data.maxResponseTokens: responses end before they could move.",
        _message(
            "afterTokens %d is not below data.maxResponseTokens %d: responses end before they could move. Lower it, or remove "
            "stragglerLane.",
            *("self.rollout.stragglerLane.afterTokens", "self.data.maxResponseTokens"),
        ),
        ".rollout.stragglerLane.afterTokens",
        ratchets=True,
    ),
    Rule(
        "self.accelerator.profile == 'CPU' || !has(self.rollout) || self.rollout.engine != 'Torch' || "
        "!has(self.rollout.stragglerLane)",
        "A Torch replica computes on one device, so a straggler lane is not faster. Remove it, or set rollout.engine to VLLM.",
        field=".rollout.stragglerLane",
        ratchets=True,
    ),
    Rule(
        "!has(self.algorithm.overlongPenalty) || self.algorithm.overlongPenalty.bufferTokens <= self.data.maxResponseTokens",
        "bufferTokens must be at most data.maxResponseTokens, or every response is penalised.",
        field=".algorithm.overlongPenalty.bufferTokens",
    ),
    Rule(
        f"!(self.algorithm.loss.type in {list(DIVERGENCE_MASKED)}) || self.algorithm.correction.type == 'None'",
        "DPPO bounds the divergence from the policy that sampled, and the ratio covers the whole change: set correction.type "
        "to None.",
        field=".algorithm.correction.type",
    ),
    Rule(
        f"self.algorithm.loss.type in {list(DIVERGENCE_MASKED)} || !has(self.algorithm.loss.maxDivergence)",
        "Only the losses DPPOBinaryTV and DPPOBinaryKL have maxDivergence. Remove it.",
        field=".algorithm.loss.maxDivergence",
    ),
    Rule(
        "self.algorithm.loss.type != 'SAPO' || self.algorithm.correction.type == 'None' || self.async.updatesPerBatch > 1",
        "With a correction and one update per batch, every ratio is 1, where the gate of loss SAPO does nothing: set "
        "correction.type to None, or async.updatesPerBatch to at least 2.",
        field=".algorithm.correction.type",
        ratchets=True,
    ),
    Rule(
        "!has(self.rollout) || self.rollout.engine != 'VLLM' || self.evaluation.temperature == 0.0 || "
        f"self.evaluation.temperature >= {MIN_VLLM_TEMPERATURE}",
        f"With engine VLLM temperature must be 0, or at least {MIN_VLLM_TEMPERATURE}, which vLLM uses in place of a lower one.",
        field=".evaluation.temperature",
        ratchets=True,
    ),
    Rule(
        f"{KL}.placement == 'LossAndReward' || !has({KL}.rewardCoefficient)",
        "Only placement LossAndReward has rewardCoefficient. Remove it.",
        field=".algorithm.kl.rewardCoefficient",
    ),
    Rule(
        f"{KL}.placement == 'LossAndReward' || !has({KL}.rewardEstimator)",
        "Only placement LossAndReward has rewardEstimator. Remove it.",
        field=".algorithm.kl.rewardEstimator",
    ),
    Rule(
        f"{KL}.placement != 'None' || !has({KL}.adaptive)",
        "placement None has no penalty to adapt. Remove adaptive, or set placement.",
        field=".algorithm.kl.adaptive",
    ),
    Rule(
        f"!has({KL}.adaptive) || {KL}.placement == 'None' || "
        f"(has({KL}.rewardCoefficient) ? {KL}.rewardCoefficient : {KL}.coefficient) > 0.0",
        "A coefficient of 0 is adapted by factors, so it stays 0. Raise it above 0, or remove adaptive.",
        field=".algorithm.kl",
    ),
    Rule(
        "!(self.algorithm.correction.type in ['IcePop', 'SequenceMask']) || "
        "self.algorithm.correction.floor < self.algorithm.correction.cap",
        "floor must be below cap, or nothing is kept.",
        field=".algorithm.correction.floor",
    ),
    Rule(
        "!self.rewards.exists(reward, reward.type == 'Gym') || self.data.train.exists(source, has(source.gym)) || "
        "self.data.validation.exists(source, has(source.gym))",
        "A reward of type Gym scores prompts of gym sources, and there is none. Add one under data.train.",
        field=".rewards",
    ),
)

# Fields that no rule of this module fixes are live: suspend, checkpoint except its storage, evaluation, failurePolicy,
# activeDeadlineSeconds, cleanupSecondsAfterFinished, and the sizes and autoscale of rollout.
WHILE_SUSPENDED = (
    *map(_suspended, ("accelerator", "rewards", "algorithm", "train", "async", "publication", "tracking", "pods")),
    _suspended(
        "rollout",
        "engine",
        "tensorParallel",
        "memoryFraction",
        "maxSequencesPerReplica",
        "temperature",
        "topP",
        "topK",
        "minP",
    ),
    _suspended_option("stragglerLane"),
    _suspended_option("vllm"),
    Rule(
        "has(self.checkpoint.storage) == has(oldSelf.checkpoint.storage) && "
        "(!has(self.checkpoint.storage) || self.checkpoint.storage == oldSelf.checkpoint.storage)",
        "checkpoint.storage cannot change during a training. Create a new Qwen35Training instead.",
        field=".checkpoint.storage",
        reason="FieldValueForbidden",
    ),
    Rule(
        "has(self.train.lora) == has(oldSelf.train.lora) && "
        "(!has(self.train.lora) || self.train.lora == oldSelf.train.lora)",
        "train.lora cannot change during a training: checkpoints hold its adapters. Create a new Qwen35Training instead.",
        field=".train.lora",
        reason="FieldValueForbidden",
    ),
    Rule(
        "has(self.train.multiTokenPrediction) == has(oldSelf.train.multiTokenPrediction) && "
        "(!has(self.train.multiTokenPrediction) || self.train.multiTokenPrediction == oldSelf.train.multiTokenPrediction)",
        "train.multiTokenPrediction cannot change during a training: checkpoints hold its head. Create a new Qwen35Training instead.",
        field=".train.multiTokenPrediction",
        reason="FieldValueForbidden",
    ),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "": (
        Rule(
            "size(self.metadata.name) <= 40 && self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
            "metadata.name must start with a letter and have at most 40 letters, digits and dashes: names of child "
            "objects are made of it.",
        ),
    ),
    "spec": (*MODES, *LAYOUT, *LANE, *VALUES, *WHILE_SUSPENDED),
    "spec.mode": (_fixed("mode"),),
    "spec.seed": (_fixed("seed"),),
    "spec.accelerator.profile": (_fixed("accelerator.profile"),),
    "spec.model": (_fixed("model"),),
    "spec.model.source": (_one_of("persistentVolumeClaim", "path", "random"),),
    "spec.model.source.random": (
        Rule(
            "self.attentionHeads % self.keyValueHeads == 0",
            "attentionHeads must be a multiple of keyValueHeads.",
            field=".attentionHeads",
        ),
        Rule(
            "self.linearValueHeads % self.linearKeyHeads == 0",
            "linearValueHeads must be a multiple of linearKeyHeads.",
            field=".linearValueHeads",
        ),
        Rule(
            "self.experts == 0 || self.expertsPerToken <= self.experts",
            "expertsPerToken must be at most experts.",
            field=".expertsPerToken",
        ),
    ),
    "spec.data": (
        _fixed("data"),
        Rule(
            "self.train.all(one, !self.validation.exists(other, one.name == other.name))",
            "A source of train and one of validation have the same name. Rename one.",
            field=".validation",
        ),
    ),
    "spec.data.train[]": (_one_of("files", "gym"),),
    "spec.data.validation[]": (_one_of("files", "gym"),),
    "spec.rewards": (
        Rule(
            f"self.all(one, self.exists_one(other, {REWARD_NAME.format('one')} == {REWARD_NAME.format('other')}))",
            "Two rewards have the same name, which by default is the type. Give them names of their own.",
        ),
    ),
    "spec.rewards[]": (
        Rule(
            "(self.type == 'Function') == has(self.__function__)",
            "Type Function needs function: module:name, and no other type has it.",
        ),
        Rule(
            "!has(self.extract) || self.type in ['Math', 'ExactMatch']",
            "extract belongs to the types Math and ExactMatch. Remove it.",
            field=".extract",
        ),
    ),
    "spec.algorithm.groupSize": (_fixed("algorithm.groupSize"),),
    "spec.pods.env[]": (
        _one_of("value", "valueFrom"),
        Rule(
            "!self.name.startsWith('QWEN35_')",
            "Variables that start with QWEN35_ are set by the operator. Remove it.",
            field=".name",
        ),
    ),
    "spec.rollout": (
        Rule(
            "!has(self.minNodes) || self.minNodes <= self.nodes",
            "minNodes must be at most nodes.",
            _message("minNodes %d is above nodes %d.", "self.minNodes", "self.nodes"),
            ".minNodes",
        ),
        Rule(
            "!has(self.maxNodes) || self.maxNodes >= self.nodes",
            "maxNodes must be at least nodes.",
            _message("maxNodes %d is below nodes %d.", "self.maxNodes", "self.nodes"),
            ".maxNodes",
        ),
        Rule(
            "!has(self.stragglerLane) || self.stragglerLane.nodes < self.nodes",
            "stragglerLane.nodes must be less than nodes: the lane is a part of the pool.",
            field=".stragglerLane.nodes",
        ),
        Rule(
            "!has(self.stragglerLane) || !has(self.minNodes) || self.stragglerLane.nodes < self.minNodes",
            "minNodes must be more than stragglerLane.nodes: the lane is a part of the pool.",
            field=".minNodes",
            ratchets=True,
        ),
        Rule(
            "!has(self.stragglerLane) || self.stragglerLane.tensorParallel > self.tensorParallel",
            "stragglerLane.tensorParallel must be more than tensorParallel, otherwise the lane is not faster.",
            _message(
                "stragglerLane.tensorParallel %d is not above tensorParallel %d, so the lane is not faster. Raise it, or remove "
                "stragglerLane.",
                *("self.stragglerLane.tensorParallel", "self.tensorParallel"),
            ),
            ".stragglerLane.tensorParallel",
            ratchets=True,
        ),
        Rule(
            "!has(self.vllm) || self.engine == 'VLLM'",
            "vllm has options of the engine VLLM. Remove it, or set engine to VLLM.",
            field=".vllm",
        ),
        Rule(
            "!has(self.vllm) || !has(self.vllm.maxBatchedTokens) || "
            "self.vllm.maxBatchedTokens >= self.maxSequencesPerReplica",
            "vllm.maxBatchedTokens must be at least maxSequencesPerReplica: a step computes one token for each sequence.",
            field=".vllm.maxBatchedTokens",
        ),
        Rule(
            f"self.engine != 'VLLM' || self.topK <= {MAX_VLLM_TOP_K}",
            f"With engine VLLM topK must be at most {MAX_VLLM_TOP_K}, because it returns this many log-probs per token.",
            field=".topK",
        ),
        Rule(
            "self.engine != 'VLLM' || self.topK > 0 || (self.topP == 1.0 && self.minP == 0.0)",
            f"topP and minP with engine VLLM need a topK of at most {MAX_VLLM_TOP_K}, because it returns the log-prob of each kept "
            "token. Set topK, or use engine Torch.",
            field=".topK",
        ),
        Rule(
            f"self.engine != 'VLLM' || self.temperature >= {MIN_VLLM_TEMPERATURE}",
            f"With engine VLLM temperature must be at least {MIN_VLLM_TEMPERATURE}, which vLLM uses in place of a lower one.",
            field=".temperature",
            ratchets=True,
        ),
    ),
    "spec.train.engine": (_fixed("train.engine"),),
    "spec.train.parallelism": (_fixed("train.parallelism"),),
    "spec.train.freeze": (_fixed("train.freeze"),),
    "spec.train.optimizer.type": (_fixed("train.optimizer.type"),),
    "spec.checkpoint.storage": (_one_of("persistentVolumeClaim", "path"),),
}
