"""The objects beside the RayJob: created when absent, updated when they differ from what is desired."""

from qwen35_operator.api.training import Training
from qwen35_operator.desired import control, history, names, objects_of, progress
from qwen35_operator.reconcile.actions import Action, Create, Manifest, Update
from qwen35_operator.reconcile.observed import Observed
from qwen35_trainer.contract import Control, Live, Stop


def ensured(seen: Observed, training: Training, wanted: Control) -> tuple[Action, ...]:
    """What brings every child but the RayJob about, in order of creation."""
    actions = [_ensured(seen, manifest) for manifest in objects_of.always(training)]
    trainers = (progress.build(training), history.build(training))  # once they are there
    actions += [Create(one) for one in trainers if ("ConfigMap", one["metadata"]["name"]) not in seen.children]
    actions.append(_ensured(seen, control.build(training, wanted)))
    return tuple(action for action in actions if action is not None)


def ordered_to_stop(seen: Observed, training: Training, attempt: int, order: Stop) -> tuple[Action, ...]:
    """`-control` with an order to stop, and all else as it was."""
    before = seen.control if seen.control is not None and seen.control.attempt == attempt else None
    wanted = (before or controlling(training, attempt, 0)).model_copy(update={"stop": order})
    action = _ensured(seen, control.build(training, wanted))
    return () if action is None else (action,)


def controlling(training: Training, attempt: int, rollout_nodes: int, leaving: tuple[str, ...] = ()) -> Control:
    """What an attempt is asked while nothing is to stop."""
    spec = training.spec
    live = Live(
        checkpointEveryUpdates=spec.checkpoint.everyUpdates,
        checkpointKeep=spec.checkpoint.keep,
        evaluationEveryUpdates=spec.evaluation.everyUpdates,
        checkpointExport=spec.checkpoint.export,
    )
    return Control(attempt=attempt, rolloutNodes=rollout_nodes, leaving=leaving, live=live)


def _ensured(seen: Observed, manifest: Manifest) -> Action | None:
    child = seen.children.get((manifest["kind"], manifest["metadata"]["name"]))
    if child is None:
        return Create(manifest)
    if child.hash == manifest["metadata"]["annotations"][names.HASH]:
        return None
    return Update(manifest, child.uid)
