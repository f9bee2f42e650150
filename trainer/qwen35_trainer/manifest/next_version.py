"""Values that v1alpha1 accepts and v1beta1 will refuse (docs/design/api-versions.md).

They are valid today. `qwen35 validate` prints them, so that manifests can be changed before v1beta1 exists.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from qwen35_trainer.manifest.problems import Problem
from qwen35_trainer.manifest.training import TrainingSpec


def notices(spec: TrainingSpec) -> list[Problem]:
    """Return a notice for each value of the spec that v1beta1 will refuse."""
    return [*_fractional_seconds(spec), *_repeated_items(spec)]


def _fractional_seconds(spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a notice for each duration that is not a whole number of seconds."""
    durations = {
        "spec.train.collectiveTimeoutSeconds": spec.train.collectiveTimeoutSeconds,
        "spec.async.stallSeconds": spec.async_.stallSeconds,
        "spec.publication.timeoutSeconds": spec.publication.timeoutSeconds,
        "spec.failurePolicy.backoffSeconds": spec.failurePolicy.backoffSeconds,
    }
    durations |= {
        f"spec.rewards[{index}].timeoutSeconds": each.timeoutSeconds for index, each in enumerate(spec.rewards)
    }
    for path, seconds in durations.items():
        if not float(seconds).is_integer():
            fix = f"Use {max(1, round(seconds))}."
            yield Problem(path, f"{seconds} is not a whole number of seconds, which v1beta1 requires.", fix)


def _repeated_items(spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a notice for each list that contains an item twice and will be a set."""
    lists: dict[str, Iterable[object]] = {"spec.train.freeze": spec.train.freeze}
    if spec.train.lora is not None:
        lists["spec.train.lora.targets"] = spec.train.lora.targets
    for index, rule in enumerate(spec.failurePolicy.rules):
        place = f"spec.failurePolicy.rules[{index}]"
        lists |= {f"{place}.onExitCodes": rule.onExitCodes, f"{place}.onReasons": rule.onReasons}
    for path, items in lists.items():
        if twice := [item for item, count in Counter(items).items() if count > 1]:
            yield Problem(path, f"{twice[0]} is listed twice; in v1beta1 this list is a set.", "Keep one.")
