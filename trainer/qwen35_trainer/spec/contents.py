"""Checks within sections: one of several, unique names, values that exclude each other."""

import re
from collections import Counter
from collections.abc import Iterator

from qwen35_trainer.spec.base import Section
from qwen35_trainer.spec.problems import Problem, either
from qwen35_trainer.spec.training import TrainingSpec

FLOORED = ("IcePop", "SequenceMask")


def model_source(spec: TrainingSpec) -> Iterator[Problem]:
    """The weights come from one place."""
    yield from _exactly_one("spec.model.source", spec.model.source)


def random_model(spec: TrainingSpec) -> Iterator[Problem]:
    """The shape of random weights is one that Qwen3.5 can have."""
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
    """Each source is of one kind, and its name, which prompts carry, is its own."""
    places = [(f"spec.data.train[{index}]", source) for index, source in enumerate(spec.data.train)]
    places += [(f"spec.data.validation[{index}]", source) for index, source in enumerate(spec.data.validation)]
    for path, source in places:
        yield from _exactly_one(path, source, options=("files", "gym"))
    yield from _unique("source", [(path, source.name) for path, source in places])


def gym_reward(spec: TrainingSpec) -> Iterator[Problem]:
    """A gym's scorer scores the prompts of a gym."""
    if any(source.gym for source in (*spec.data.train, *spec.data.validation)):
        return
    for index, reward in enumerate(spec.rewards):
        if reward.type == "Gym":
            fix = "Add one under data.train (gym: {task: ..., size: ...}), or use type Math or ExactMatch."
            yield Problem(f"spec.rewards[{index}].type", "Gym scores prompts of gym sources, and there is none.", fix)


def reward_options(spec: TrainingSpec) -> Iterator[Problem]:
    """Each type has its own options, and only those."""
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
    """A function of the user's own where the type says Function, and only there."""
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
    """Rewards are told apart in metrics by name, or else by type."""
    names = [(f"spec.rewards[{index}]", reward.name or reward.type) for index, reward in enumerate(spec.rewards)]
    yield from _unique("reward", names)


def reward_patterns(spec: TrainingSpec) -> Iterator[Problem]:
    """RE2, which extracts from responses, compiles the expression."""
    for index, reward in enumerate(spec.rewards):
        if reward.extract is not None and (reason := _refused_by_re2(reward.extract)):
            fix = "Correct it; a literal sign needs \\. RE2 has no look-around and no back-references."
            message = f"{reward.extract} is not an RE2 expression: {reason}."
            yield Problem(f"spec.rewards[{index}].extract", message, fix)


def clip(spec: TrainingSpec) -> Iterator[Problem]:
    """A ratio is never below 0, so a lower bound of 0 clips nothing."""
    low = spec.algorithm.loss.clipLow
    if low >= 1:
        yield Problem("spec.algorithm.loss.clipLow", f"{low} is not below 1: no ratio is ever clipped.", "Use 0.2.")


def correction(spec: TrainingSpec) -> Iterator[Problem]:
    """The masks keep what is between floor and cap."""
    chosen = spec.algorithm.correction
    if chosen.type in FLOORED and chosen.floor >= chosen.cap:
        yield Problem(
            "spec.algorithm.correction.floor",
            f"{chosen.floor} is not below cap {chosen.cap}: {chosen.type} would keep nothing.",
            f"Lower it below {chosen.cap}, or raise cap above {chosen.floor}.",
        )


def elasticity(spec: TrainingSpec) -> Iterator[Problem]:
    """The present size lies within its bounds."""
    if (pool := spec.rollout) is None:
        return
    if pool.minNodes is not None and pool.minNodes > pool.nodes:
        fix = f"Lower it to at most {pool.nodes}, or raise nodes to {pool.minNodes}."
        yield Problem("spec.rollout.minNodes", f"{pool.minNodes} is above nodes {pool.nodes}.", fix)
    if pool.maxNodes is not None and pool.maxNodes < pool.nodes:
        fix = f"Raise it to at least {pool.nodes}, or lower nodes to {pool.maxNodes}."
        yield Problem("spec.rollout.maxNodes", f"{pool.maxNodes} is below nodes {pool.nodes}.", fix)


def lane(spec: TrainingSpec) -> Iterator[Problem]:
    """The lane is a part of the pool."""
    pool = spec.rollout
    if pool is None or pool.lane is None or pool.lane.nodes < pool.nodes:
        return
    fix = f"Raise rollout.nodes to at least {pool.lane.nodes + 1}"
    fix += f", or use {pool.nodes - 1} here." if pool.nodes > 1 else ", or remove the lane."
    yield Problem(
        "spec.rollout.lane.nodes", f"{pool.lane.nodes} leaves none of the pool's {pool.nodes} nodes for the rest.", fix
    )


def checkpoint_storage(spec: TrainingSpec) -> Iterator[Problem]:
    """Checkpoints go to one place."""
    if spec.checkpoint.storage is not None:
        yield from _exactly_one("spec.checkpoint.storage", spec.checkpoint.storage)


def variables(spec: TrainingSpec) -> Iterator[Problem]:
    """A variable is written or read from a Secret, once, and is none that the operator sets."""
    for index, variable in enumerate(spec.pods.environment):
        path = f"spec.pods.environment[{index}]"
        if (variable.value is None) == (variable.secret is None):
            yield Problem(path, f"{variable.name} needs exactly one of value and secret.", "Write one of the two.")
        if variable.name.startswith("QWEN35_"):
            yield Problem(f"{path}.name", f"{variable.name} is the operator's to set.", "Remove it.")
    names = [(f"spec.pods.environment[{index}]", variable.name) for index, variable in enumerate(spec.pods.environment)]
    yield from _unique("variable", names)


def rule_names(spec: TrainingSpec) -> Iterator[Problem]:
    """A rule that applied is named in status."""
    rules = spec.failurePolicy.rules
    yield from _unique("rule", [(f"spec.failurePolicy.rules[{index}]", rule.name) for index, rule in enumerate(rules)])


def rule_patterns(spec: TrainingSpec) -> Iterator[Problem]:
    """A rule's expression compiles."""
    for index, rule in enumerate(spec.failurePolicy.rules):
        yield from _compiles(f"spec.failurePolicy.rules[{index}].messagePattern", rule.messagePattern)


def _exactly_one(path: str, section: Section, options: tuple[str, ...] = ()) -> Iterator[Problem]:
    options = options or tuple(type(section).model_fields)
    given = [name for name in options if getattr(section, name) is not None]
    if not given:
        yield Problem(path, f"names none of {', '.join(options)}.", f"Add exactly one: {either(options)}.")
    if len(given) > 1:
        yield Problem(path, f"names {' and '.join(given)}, which exclude each other.", f"Keep one: {either(given)}.")


def _unique(noun: str, names: list[tuple[str, str]]) -> Iterator[Problem]:
    first: dict[str, str] = {}
    taken = {name for _, name in names}
    for path, name in names:
        if name in first:
            free = next(other for number in range(2, len(names) + 2) if (other := f"{name}-{number}") not in taken)
            yield Problem(f"{path}.name", f'"{name}" is already the {noun} {first[name]}.', f"Name it {free}.")
        first.setdefault(name, path)


def _compiles(path: str, pattern: str | None) -> Iterator[Problem]:
    if pattern is None:
        return
    try:
        re.compile(pattern)
    except re.error as error:
        place = f" at character {error.pos + 1}" if error.pos is not None else ""
        yield Problem(
            path, f"{pattern} is not a regular expression: {error.msg}{place}.", "Correct it; a literal sign needs \\."
        )


def _refused_by_re2(pattern: str) -> str:
    """Why RE2 does not take it; empty when it does."""
    import re2  # here, because most manifests have no expression

    options = re2.Options()
    options.log_errors = False
    try:
        re2.compile(pattern, options=options)
    except re2.error as error:
        return error.args[0].decode() if isinstance(error.args[0], bytes) else str(error.args[0])
    return ""
