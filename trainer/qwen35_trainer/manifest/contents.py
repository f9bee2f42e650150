"""Checks within sections: exactly one of several fields, unique names, and values that exclude each other."""

from collections import Counter
from collections.abc import Iterator

from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.problems import Problem, either
from qwen35_trainer.manifest.rollout import MAX_VLLM_TOP_K
from qwen35_trainer.manifest.rule_pattern import PatternRefused, rule_pattern
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.manifest.vllm import EXPERT_PARALLEL, RESERVED_ARGUMENTS, truth_of

FLOORED = ("IcePop", "SequenceMask")
DIVERGENCE_MASKED = ("DPPOBinaryTV", "DPPOBinaryKL")


def model_source(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that exactly one source of weights is given."""
    yield from _exactly_one("spec.model.source", spec.model.source)


def random_model(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the shape of a random model is a valid Qwen3.5 shape."""
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
    """Check that each source has either files or gym, and a unique name, because the ids of its prompts contain the
    name.
    """
    places = [(f"spec.data.train[{index}]", source) for index, source in enumerate(spec.data.train)]
    places += [(f"spec.data.validation[{index}]", source) for index, source in enumerate(spec.data.validation)]
    for path, source in places:
        yield from _exactly_one(path, source, options=("files", "gym"))
    yield from _unique("source", [(path, source.name) for path, source in places])


def vllm_options(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that spec.rollout.vllm is set only for the engine VLLM, and that a step has room for all sequences."""
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
    """Check that extraArguments of vLLM does not name an argument that another field or the engine sets.

    The value of enable_expert_parallel must be a truth value, because the train ranks stage the weights by it.
    """
    if spec.rollout is None or spec.rollout.vllm is None:
        return
    for name, value in spec.rollout.vllm.extraArguments.items():
        path = f"spec.rollout.vllm.extraArguments.{name}"
        if (reason := RESERVED_ARGUMENTS.get(name.replace("-", "_"))) is not None:
            yield Problem(path, f"it cannot be set here: {reason}.", "Remove it.")
        if name == EXPERT_PARALLEL and truth_of(value) is None:
            yield Problem(path, f"{value} is neither true nor false.", "Set it to true or false.")


def gym_reward(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that a reward of type Gym has a gym source whose prompts it can score."""
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
    """Check that loss and advantage of type Function name a function of the user, and that those of other types do
    not.
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
    """Check that rewards have unique names, or unique types where they have no name: metrics are named after them."""
    names = [(f"spec.rewards[{index}]", reward.name or reward.type) for index, reward in enumerate(spec.rewards)]
    yield from _unique("reward", names)


def reward_patterns(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that RE2, which extracts answers from responses, accepts each expression."""
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
    """Check that the penalty for long responses begins within the length limit."""
    penalty, limit = spec.algorithm.overlongPenalty, spec.data.maxResponseTokens
    if penalty is not None and penalty.bufferTokens > limit:
        yield Problem(
            "spec.algorithm.overlongPenalty.bufferTokens",
            f"{penalty.bufferTokens} is above data.maxResponseTokens {limit}: every response would be penalised.",
            f"Lower it to at most {limit}; DAPO uses a fifth of the limit.",
        )


def divergence(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that DPPO has no correction, and that no other loss has a maximum divergence.

    DPPO's trust region is around the policy that sampled. With another correction it would be around the proximal policy, which is
    the current one if a batch has one update: then the divergence is 0 and nothing is ever masked.
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


def kl(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that the reward's own settings have a penalty in loss and reward, and that an adaptive coefficient can change."""
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
    """Check that floor is below cap, for the corrections that leave out everything with a ratio outside these bounds."""
    chosen = spec.algorithm.correction
    if chosen.type in FLOORED and chosen.floor >= chosen.cap:
        yield Problem(
            "spec.algorithm.correction.floor",
            f"{chosen.floor} is not below cap {chosen.cap}: {chosen.type} would keep nothing.",
            f"Lower it below {chosen.cap}, or raise cap above {chosen.floor}.",
        )


def elasticity(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that nodes lies between minNodes and maxNodes."""
    if (pool := spec.rollout) is None:
        return
    if pool.minNodes is not None and pool.minNodes > pool.nodes:
        fix = f"Lower it to at most {pool.nodes}, or raise nodes to {pool.minNodes}."
        yield Problem("spec.rollout.minNodes", f"{pool.minNodes} is above nodes {pool.nodes}.", fix)
    if pool.maxNodes is not None and pool.maxNodes < pool.nodes:
        fix = f"Raise it to at least {pool.nodes}, or lower nodes to {pool.maxNodes}."
        yield Problem("spec.rollout.maxNodes", f"{pool.maxNodes} is below nodes {pool.nodes}.", fix)


def vllm_candidates(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that truncated sampling with VLLM keeps a bounded number of tokens, because vLLM returns each of them."""
    pool = spec.rollout
    if pool is None or pool.engine != "VLLM":
        return
    if pool.topK > MAX_VLLM_TOP_K:
        message = f"{pool.topK} is above {MAX_VLLM_TOP_K}, the maximum with engine VLLM, which returns this many log-probs per token."
        yield Problem("spec.rollout.topK", message, f"Lower it to at most {MAX_VLLM_TOP_K}, or use engine Torch.")
    if pool.topK == 0 and (pool.topP < 1 or pool.minP > 0):
        message = "topP and minP keep a number of tokens without a bound, and engine VLLM returns the log-prob of each."
        yield Problem("spec.rollout.topK", message, f"Set topK to at most {MAX_VLLM_TOP_K}, or use engine Torch.")


def checkpoint_storage(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that exactly one storage for checkpoints is given."""
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
    """Check that each variable has one source, a unique name, and a name that the operator does not set."""
    for index, variable in enumerate(spec.pods.env):
        path = f"spec.pods.env[{index}]"
        if (variable.value is None) == (variable.valueFrom is None):
            yield Problem(path, f"{variable.name} needs exactly one of value and valueFrom.", "Write one of the two.")
        if variable.name.startswith("QWEN35_"):
            yield Problem(f"{path}.name", f"{variable.name} is set by the operator.", "Remove it.")
    names = [(f"spec.pods.env[{index}]", variable.name) for index, variable in enumerate(spec.pods.env)]
    yield from _unique("variable", names)


def rule_names(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that rules have unique names: the status names the rule that applied."""
    rules = spec.failurePolicy.rules
    yield from _unique("rule", [(f"spec.failurePolicy.rules[{index}]", rule.name) for index, rule in enumerate(rules)])


def rule_patterns(spec: TrainingSpec) -> Iterator[Problem]:
    """Check that RE2, which the operator matches messages with, accepts the expression of each rule."""
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
