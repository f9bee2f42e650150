"""Whether there is anything to do with this object: it can be read, can be run, and its kinds can be watched."""

from datetime import datetime

from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import State
from qwen35_operator.desired import objects_of
from qwen35_operator.reconcile import attempts
from qwen35_operator.reconcile.observed import Observed
from qwen35_operator.reconcile.verdict import Verdict
from qwen35_operator.settings import Settings
from qwen35_operator.status.conditions import no
from qwen35_trainer.spec import Problem, cannot_run


def refusals(training: Training, settings: Settings) -> list[Problem]:
    """Why a training whose spec has no problems of its own is not accepted."""
    return [*cannot_run(training.spec), *objects_of.problems(training, settings)]


def decide(seen: Observed, settings: Settings, now: datetime) -> Verdict | None:
    """Nothing when all is well. An attempt under way is left alone: what it runs was accepted."""
    state: State = "Pending" if attempts.opened(seen) is None else "Running"
    if seen.unavailable:
        message = "; ".join(f"{problem.message} {problem.fix}" for problem in seen.unavailable)
        return Verdict(state, "Unavailable", message)
    problems = list(seen.problems)
    if seen.training is not None:
        problems += refusals(seen.training, settings)
    elif not problems:
        raise AssertionError(f"{seen.namespace}/{seen.name}: no spec, and no problem with it")
    if not problems:
        return None
    message = "; ".join(f"{problem.path}: {problem.message} {problem.fix}" for problem in problems)
    return Verdict(state, "Invalid", message, accepted=no("Invalid", message))
