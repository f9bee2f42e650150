"""Decides whether the operator can work on a training: its spec can be read and run, and its objects can be watched."""

from typing import Final
from weakref import WeakKeyDictionary

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import State
from qwen35_operator.desired import all_objects, pod_size
from qwen35_operator.desired.problem_limits import MAX_PROBLEMS, first_problems
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.decision import Verdict
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.status.conditions import no
from qwen35_trainer.manifest import Problem, cannot_run, check_new
from qwen35_trainer.manifest.publication import NO_SHARED_MEMORY, RELATIVE_FOLDER, PublicationSpec

LATER_FIELD: Final = "the operator does not know this field: the installed CRD is that of a later release."
LATER_FIX: Final = "Upgrade the operator, or install the CRD of its release."


_refusals: WeakKeyDictionary[TrainingResource, tuple[OperatorSettings, tuple[Problem, ...]]] = WeakKeyDictionary()
"""Cache of `refusals`, by training: for the largest spec that is read they take 0.2 s, and every reconcile needs them."""


def refusals(training: TrainingResource, settings: OperatorSettings) -> tuple[Problem, ...]:
    """Return the problems because of which the operator refuses a training whose spec is valid.

    The problems are features that this release cannot run, settings that cannot work in pods, and settings from which
    no objects can be built. They are found once per parsed training.
    """
    checked = _refusals.get(training)
    if checked is None or checked[0] != settings:
        problems = (
            *cannot_run(training.spec),
            *problems_in_pods(training.spec.publication),
            *all_objects.problems(training, settings),
        )
        checked = _refusals[training] = settings, problems
    return checked[1]


def problems_in_pods(publication: PublicationSpec) -> list[Problem]:
    """Return the problem for which weights cannot reach replicas in pods, or an empty list if they can."""
    if publication.transport == "SharedMemory":
        return [NO_SHARED_MEMORY]
    relative = publication.folder is not None and not publication.folder.startswith("/")
    return [RELATIVE_FOLDER] if relative else []


def accept(observed: Observed, settings: OperatorSettings) -> TrainingResource | Verdict:
    """Return the training if the operator can work on it; otherwise return a verdict with the reason.

    An open attempt keeps running while its training is refused. A training that has had an attempt is not refused by
    checks that apply only to new trainings (`check_new`), nor because its memory plan does not fit the devices, nor
    because of fields that this operator does not know: its CRD may have been upgraded before it, or not taken back with it.
    """
    state: State = "Pending" if attempts.open_attempt(observed) is None else "Running"
    if observed.unavailable:
        message = "; ".join(f"{problem.message} {problem.fix}" for problem in observed.unavailable)
        return Verdict(state, "Unavailable", message)
    training, problems = observed.training, list(observed.problems)
    if training is not None:
        problems += refusals(training, settings)
        if not observed.status.attempts:
            problems += [*check_new(training.spec), *pod_size.problems(training)]
            problems += [Problem(path, LATER_FIELD, LATER_FIX) for path in training.unknown[:MAX_PROBLEMS]]
    if training is not None and not problems:
        return training
    assert problems, f"{observed.namespace}/{observed.name}: the spec was not read, and no problem was reported"
    shown = first_problems(problems)
    message = "; ".join(f"{problem.path}: {problem.message} {problem.fix}" for problem in shown)
    return Verdict(state, "Invalid", message, accepted=no("Invalid", message))
