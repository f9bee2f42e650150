"""Checks of fields within sections.

For example, they report a section that needs exactly one of several fields and has none or several of them, names that
are not unique, and values that exclude each other.
"""

from collections import Counter
from collections.abc import Iterator

from qwen35_trainer.manifest import megatron
from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.problems import Problem, either
from qwen35_trainer.manifest.rollout import MAX_VLLM_TOP_K, MIN_VLLM_TEMPERATURE
from qwen35_trainer.manifest.rule_pattern import PatternRefused, rule_pattern
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.manifest.vllm import EXPERT_PARALLEL, RESERVED_ARGUMENTS, truth_of

FLOORED = ("IcePop", "SequenceMask")
DIVERGENCE_MASKED = ("DPPOBinaryTV", "DPPOBinaryKL")


def model_source(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that spec.model.source names exactly one source of weights."""
    yield from _exactly_one("spec.model.source", spec.model.source)


def random_model(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the sizes of a random model are valid for a Qwen3.5 model, and that its alphabet has no character twice."""
    if (shape := spec.model.source.random) is None:
        return
    path = "spec.model.source.random"
    for few, many in (("keyValueHeads", "attentionHeads"), ("linearKeyHeads", "linearValueHeads")):
        part, whole = getattr(shape, few), getattr(shape, many)
        if whole % part:
            yield Problem(
                f"{path}.{many}", f"{whole} is not a multiple of {few} {part}.", f"Use {-(-whole // part) * part}."
            )
    if 0 < shape.experts < shape.expertsPerToken:
        fix = f"Use at most {shape.experts}, or 0 experts."
        yield Problem(f"{path}.expertsPerToken", f"{shape.expertsPerToken} is above experts {shape.experts}.", fix)
    if twice := [letter for letter, count in Counter(shape.characters).items() if count > 1]:
        shown = ", ".join(map(repr, twice[:5]))
        yield Problem(f"{path}.characters", f"{shown} appears more than once.", "Name each character once.")


def data_sources(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that each data source has either files or gym, and a unique name. The ids of prompts contain the name."""
    places = [(f"spec.data.train[{index}]", source) for index, source in enumerate(spec.data.train)]
    places += [(f"spec.data.validation[{index}]", source) for index, source in enumerate(spec.data.validation)]
    for path, source in places:
        yield from _exactly_one(path, source, options=("files", "gym"))
    yield from _unique("source", [(path, source.name) for path, source in places])


def vllm_options(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that spec.rollout.vllm is set only with the engine VLLM.

    Also check that maxBatchedTokens is at least maxSequencesPerReplica. Each sequence needs one token in a decode step.
    """
    if (rollout := spec.rollout) is None or (options := rollout.vllm) is None:
        return
    path = "spec.rollout.vllm"
    if rollout.engine != "VLLM":
        yield Problem(path, f"the engine is {rollout.engine}.", "Remove it, or set rollout.engine to VLLM.")
        return
    if options.maxBatchedTokens is not None and options.maxBatchedTokens < rollout.maxSequencesPerReplica:
        message = f"{options.maxBatchedTokens} tokens are less than one for each of {rollout.maxSequencesPerReplica} sequences."
        fix = f"Raise it to at least {rollout.maxSequencesPerReplica}, or lower rollout.maxSequencesPerReplica."
        yield Problem(f"{path}.maxBatchedTokens", message, fix)


def vllm_arguments(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that vLLM's extraArguments contain no argument that another field or the engine sets.

    Also check that the value of enable_expert_parallel is true or false, because this value decides in which layout the
    train ranks publish the experts.
    async_scheduling must not be true with the profile CPU, where vLLM would ignore it.
    """
    if spec.rollout is None or spec.rollout.vllm is None:
        return
    for name, value in spec.rollout.vllm.extraArguments.items():
        path = f"spec.rollout.vllm.extraArguments.{name}"
        if (reason := RESERVED_ARGUMENTS.get(name.replace("-", "_"))) is not None:
            yield Problem(path, f"it cannot be set here: {reason}.", "Remove it.")
        if name == "async_scheduling" and spec.accelerator.profile == "CPU" and truth_of(value):
            yield Problem(path, "vLLM does not schedule ahead on CPUs.", "Remove it.")
        if name == EXPERT_PARALLEL and truth_of(value) is None:
            yield Problem(path, f"{value} is neither true nor false.", "Set it to true or false.")


def transformer_settings(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that overrideTransformerConfig is set only with the engine Megatron, and has no setting that
    another field, the model's folder or the engine decides.
    """
    train = spec.train
    if train.overrideTransformerConfig and train.engine != "Megatron":
        message = f"engine {train.engine} has no TransformerConfig."
        yield Problem(megatron.FIELD, message, "Remove it, or use engine Megatron.")
    for name, reason in megatron.reserved(train.overrideTransformerConfig):
        yield Problem(f"{megatron.FIELD}.{name}", f"it cannot be set here: {reason}.", "Remove it.")


def gym_reward(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the data have a gym source if a reward has type Gym, which can score only prompts of gym sources."""
    if any(source.gym for source in (*spec.data.train, *spec.data.validation)):
        return
    for index, reward in enumerate(spec.rewards):
        if reward.type == "Gym":
            fix = "Add one under data.train (gym: {task: ..., size: ...}), or use type Math or ExactMatch."
            yield Problem(f"spec.rewards[{index}].type", "Gym scores prompts of gym sources, and there is none.", fix)


def reward_options(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that each reward has the options of its type, and no others."""
    for index, reward in enumerate(spec.rewards):
        path = f"spec.rewards[{index}]"
        if reward.type == "Function" and reward.function is None:
            yield Problem(f"{path}.function", "type Function needs a function.", "Add function: module:name.")
        if reward.type != "Function" and reward.function is not None:
            fix = "Remove it, or use type Function."
            yield Problem(f"{path}.function", f"type {reward.type} calls no function.", fix)
        if reward.extract is not None and reward.type not in ("Math", "ExactMatch"):
            fix = "Remove it, or use type Math or ExactMatch."
            yield Problem(f"{path}.extract", f"type {reward.type} extracts nothing.", fix)


def algorithm_functions(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that loss.function is set if, and only if, loss.type is Function.

    Also check that advantageFunction is set if, and only if, advantage is Function.
    """
    loss, algorithm = spec.algorithm.loss, spec.algorithm
    for path, name, chosen, function in (
        ("spec.algorithm.loss.function", "type", loss.type, loss.function),
        ("spec.algorithm.advantageFunction", "advantage", algorithm.advantage, algorithm.advantageFunction),
    ):
        if chosen == "Function" and function is None:
            yield Problem(path, f"{name} Function needs a function.", f"Add {path.rpartition('.')[2]}: module:name.")
        if chosen != "Function" and function is not None:
            yield Problem(path, f"{name} {chosen} calls no function.", f"Remove it, or use {name} Function.")


def reward_names(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the names of rewards are unique, because metrics are named after them. The default name is the type."""
    names = [(f"spec.rewards[{index}]", reward.name or reward.type) for index, reward in enumerate(spec.rewards)]
    yield from _unique("reward", names)


def reward_patterns(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that `extract` of each reward is a valid RE2 expression."""
    for index, reward in enumerate(spec.rewards):
        if reward.extract is not None and (reason := _refused_by_re2(reward.extract)):
            fix = "Correct it; a literal sign needs \\. RE2 has no look-around and no back-references."
            message = f"{reward.extract} is not an RE2 expression: {reason}."
            yield Problem(f"spec.rewards[{index}].extract", message, fix)


def clip(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that clipLow is below 1.

    Ratios are clipped to at least 1 - clipLow, and a bound of 0 or less would clip nothing.
    """
    low = spec.algorithm.loss.clipLow
    if low >= 1:
        yield Problem("spec.algorithm.loss.clipLow", f"{low} is not below 1: no ratio is ever clipped.", "Use 0.2.")


def overlong_buffer(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that overlongPenalty.bufferTokens is at most maxResponseTokens. Otherwise every response would be penalised."""
    penalty, limit = spec.algorithm.overlongPenalty, spec.data.maxResponseTokens
    if penalty is not None and penalty.bufferTokens > limit:
        yield Problem(
            "spec.algorithm.overlongPenalty.bufferTokens",
            f"{penalty.bufferTokens} is above data.maxResponseTokens {limit}: every response would be penalised.",
            f"Lower it to at most {limit}; DAPO uses a fifth of the limit.",
        )


def divergence(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the DPPO losses have no correction, and that only these losses have a maxDivergence.

    DPPO limits the divergence from the policy that sampled the tokens. With a correction, the divergence would be
    taken from the proximal policy. If a batch has one update, the proximal policy is the current policy, so the
    divergence would be 0 and no token masked.
    """
    loss, correction = spec.algorithm.loss, spec.algorithm.correction.type
    if loss.type in DIVERGENCE_MASKED and correction != "None":
        yield Problem(
            "spec.algorithm.correction.type",
            f"loss {loss.type} bounds the divergence from the policy that sampled, and its ratio covers the whole change; "
            f"{correction} would move both to the proximal policy.",
            "Set it to None, or use another loss.",
        )
    if loss.type not in DIVERGENCE_MASKED and loss.maxDivergence is not None:
        message = f"loss {loss.type} bounds no divergence."
        yield Problem("spec.algorithm.loss.maxDivergence", message, "Remove it, or use DPPOBinaryTV or DPPOBinaryKL.")


def soft_gate(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the ratios of the loss SAPO can differ from 1. At 1, its gate does nothing, and SAPO is the plain policy gradient.

    With a correction, a ratio is between the current policy and the policy at the batch's start. If a batch has one
    update, both are the same.
    """
    correction = spec.algorithm.correction.type
    if spec.algorithm.loss.type == "SAPO" and correction != "None" and spec.async_.updatesPerBatch == 1:
        yield Problem(
            "spec.algorithm.correction.type",
            f"with {correction} and one update per batch, the ratio of every token is 1, where the gate of loss SAPO does nothing.",
            "Set it to None, or async.updatesPerBatch to at least 2.",
        )


def kl(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that rewardCoefficient and rewardEstimator are set only with the placement LossAndReward.

    Also check that an adaptive coefficient belongs to a penalty and begins above 0. The coefficient is only
    multiplied by factors, so 0 would remain 0.
    """
    chosen, path = spec.algorithm.kl, "spec.algorithm.kl"
    if chosen.placement != "LossAndReward":
        use = "coefficient and estimator" if chosen.placement == "Reward" else "placement LossAndReward"
        for name in ("rewardCoefficient", "rewardEstimator"):
            if getattr(chosen, name) is not None:
                message = f"placement {chosen.placement} has one penalty at most."
                yield Problem(f"{path}.{name}", message, f"Remove it, or use {use}.")
    if chosen.adaptive is None:
        return
    if chosen.placement == "None":
        yield Problem(f"{path}.adaptive", "placement None has no penalty to adapt.", "Remove it, or set placement.")
    elif chosen.first_adapted == 0:
        name = "coefficient" if chosen.rewardCoefficient is None else "rewardCoefficient"
        message = f"{name} 0 stays 0: it is adapted by factors."
        yield Problem(f"{path}.{name}", message, "Raise it above 0, or remove adaptive.")


def correction(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that floor is below cap for IcePop and SequenceMask, which keep only importance weights between floor and cap."""
    chosen = spec.algorithm.correction
    if chosen.type in FLOORED and chosen.floor >= chosen.cap:
        yield Problem(
            "spec.algorithm.correction.floor",
            f"{chosen.floor} is not below cap {chosen.cap}: {chosen.type} would keep nothing.",
            f"Lower it below {chosen.cap}, or raise cap above {chosen.floor}.",
        )


def elasticity(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that rollout.nodes lies between rollout.minNodes and rollout.maxNodes."""
    if (pool := spec.rollout) is None:
        return
    if pool.minNodes is not None and pool.minNodes > pool.nodes:
        fix = f"Lower it to at most {pool.nodes}, or raise nodes to {pool.minNodes}."
        yield Problem("spec.rollout.minNodes", f"{pool.minNodes} is above nodes {pool.nodes}.", fix)
    if pool.maxNodes is not None and pool.maxNodes < pool.nodes:
        fix = f"Raise it to at least {pool.nodes}, or lower nodes to {pool.maxNodes}."
        yield Problem("spec.rollout.maxNodes", f"{pool.maxNodes} is below nodes {pool.nodes}.", fix)


def vllm_candidates(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that truncated sampling with the engine VLLM keeps at most MAX_VLLM_TOP_K tokens,
    because vLLM returns a log-prob for each.
    """
    pool = spec.rollout
    if pool is None or pool.engine != "VLLM":
        return
    if pool.topK > MAX_VLLM_TOP_K:
        message = f"{pool.topK} is above {MAX_VLLM_TOP_K}, the maximum with engine VLLM, which returns this many log-probs per token."
        yield Problem("spec.rollout.topK", message, f"Lower it to at most {MAX_VLLM_TOP_K}, or use engine Torch.")
    if pool.topK == 0 and (pool.topP < 1 or pool.minP > 0):
        message = "topP and minP keep a number of tokens without a bound, and engine VLLM returns the log-prob of each."
        yield Problem("spec.rollout.topK", message, f"Set topK to at most {MAX_VLLM_TOP_K}, or use engine Torch.")


def vllm_temperatures(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that vLLM does not raise a temperature: it uses MIN_VLLM_TEMPERATURE in place of a lower one above 0.

    The trainer would compute its log-probs at the temperature of the spec, and thus of another distribution.
    """
    if spec.rollout is None or spec.rollout.engine != "VLLM":
        return
    temperatures = {"rollout": spec.rollout.temperature, "evaluation": spec.evaluation.temperature}
    for section, temperature in temperatures.items():
        if 0 < temperature < MIN_VLLM_TEMPERATURE:
            message = f"{temperature} is below {MIN_VLLM_TEMPERATURE}, which vLLM would use in its place."
            fix = f"Raise it to at least {MIN_VLLM_TEMPERATURE}, or use engine Torch."
            yield Problem(f"spec.{section}.temperature", message, fix)


def checkpoint_storage(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that spec.checkpoint.storage, if it is set, names exactly one storage."""
    if spec.checkpoint.storage is not None:
        yield from _exactly_one("spec.checkpoint.storage", spec.checkpoint.storage)


def publication_folder(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that publication.folder is set if the transport is Folder."""
    if spec.publication.transport == "Folder" and spec.publication.folder is None:
        yield Problem(
            "spec.publication.folder",
            "The transport Folder needs a folder.",
            "Name one on a volume that both pools mount, or set publication.transport to Auto.",
        )


def variables(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that each environment variable has one source, a unique name, and a name that the operator does not set."""
    for index, variable in enumerate(spec.pods.env):
        path = f"spec.pods.env[{index}]"
        if (variable.value is None) == (variable.valueFrom is None):
            yield Problem(path, f"{variable.name} needs exactly one of value and valueFrom.", "Write one of the two.")
        if variable.name.startswith("QWEN35_"):
            yield Problem(f"{path}.name", f"{variable.name} is set by the operator.", "Remove it.")
    names = [(f"spec.pods.env[{index}]", variable.name) for index, variable in enumerate(spec.pods.env)]
    yield from _unique("variable", names)


def rule_names(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that failure rules have unique names, because the status names the rule that applied."""
    rules = spec.failurePolicy.rules
    yield from _unique("rule", [(f"spec.failurePolicy.rules[{index}]", rule.name) for index, rule in enumerate(rules)])


def rule_patterns(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that onMessagePattern of each failure rule is a valid RE2 expression."""
    for index, rule in enumerate(spec.failurePolicy.rules):
        if rule.onMessagePattern is None:
            continue
        try:
            rule_pattern(rule.onMessagePattern)
        except PatternRefused as refused:
            fix = "Correct it; a literal sign needs \\. RE2 has no look-around and no back-references."
            message = f"{rule.onMessagePattern} is not an RE2 expression: {refused}."
            yield Problem(f"spec.failurePolicy.rules[{index}].onMessagePattern", message, fix)


def _exactly_one(path: str, section: Section, options: tuple[str, ...] = ()) -> Iterator[Problem]:
    options = options or tuple(type(section).model_fields)
    chosen = [name for name in options if getattr(section, name) is not None]
    if not chosen:
        yield Problem(path, f"names none of {', '.join(options)}.", f"Add exactly one: {either(options)}.")
    if len(chosen) > 1:
        yield Problem(path, f"names {' and '.join(chosen)}, which exclude each other.", f"Keep one: {either(chosen)}.")


def _unique(noun: str, names: list[tuple[str, str]]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    taken = {name for _, name in names}
    for path, name in names:
        if name in first:
            free = next(other for number in range(2, len(names) + 2) if (other := f"{name}-{number}") not in taken)
            yield Problem(f"{path}.name", f'"{name}" is already the {noun} {first[name]}.', f"Name it {free}.")
        first.setdefault(name, path)


def _refused_by_re2(pattern: str) -> str:
    """Return why RE2 refuses the pattern, or an empty string if it accepts it."""
    import re2  # here, because most manifests have no expression

    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options=options)
    except re2.error as error:
        return error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
    return ""
