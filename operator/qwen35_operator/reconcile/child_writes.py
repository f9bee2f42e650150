"""Returns the writes that create missing children of a training, and apply changed children again.

RayJobs and the PodDisruptionBudget (`disruptions`) are left out.

A child is applied if the desired object has changed since the operator wrote it, or if somebody may have changed the
child (`drift`).
"""

from weakref import WeakKeyDictionary

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import all_objects, config, message_config_maps, object_names
from qwen35_operator.desired.objects import KubeObject
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.observed import ChildKey, Observed
from qwen35_operator.reconcile.writes import Apply, ClusterWrite, Create
from qwen35_trainer.contract import Control, LiveSettings, StopOrder
from qwen35_trainer.contract.shared_names import control_name, history_name, progress_name

_config_maps: WeakKeyDictionary[TrainingResource, KubeObject] = WeakKeyDictionary()
"""Cache of the ConfigMap `-config`, by training: building its YAML takes longer than the rest of a decision."""

_keys: WeakKeyDictionary[TrainingResource, frozenset[ChildKey]] = WeakKeyDictionary()
"""Cache of the kinds and names of the children that `repairs` restores, by training."""


def config_map(training: TrainingResource) -> KubeObject:
    """Return the ConfigMap `-config`, built once per parsed training."""
    if (built := _config_maps.get(training)) is None:
        built = _config_maps[training] = config.build(training)
    return built


def ensure(
    observed: Observed, training: TrainingResource, settings: OperatorSettings, control: Control
) -> tuple[ClusterWrite, ...]:
    """Return the writes that create missing children, and apply children that differ from the desired objects.

    RayJobs are left out. The writes are in the order of creation. control: the message that `-control` should contain.
    """
    control_map = message_config_maps.control(training, control)
    manifests = all_objects.in_order_of_creation(training, settings, config_map(training), control_map)
    writes = (ensure_child(observed, manifest) for manifest in manifests)
    return tuple(write for write in writes if write is not None)


def repairs(observed: Observed, training: TrainingResource, settings: OperatorSettings) -> tuple[Create | Apply, ...]:
    """Return the writes that restore child objects of the training, the NetworkPolicy first.

    Objects that were deleted are created again. Of the others, only those that somebody may have changed are applied
    (`observed.drifted`). The ConfigMaps of messages are left out: `-control` depends on the attempt, and `ensure` and `order_to_stop`
    write it. While one of them is missing, nothing is created: the Role must not grant rights on an object of another owner that has
    taken its name (`all_objects.in_order_of_creation`).
    """
    if (keys := _keys.get(training)) is None:
        keys = _keys[training] = frozenset(_manifests(training, settings))
    messages = {("ConfigMap", name(training.name)) for name in (control_name, progress_name, history_name)}
    missing = keys - observed.children.keys() if messages <= observed.children.keys() else frozenset()
    if not missing and not observed.drifted:
        return ()
    wanted = _manifests(training, settings)
    writes = [
        Create(manifest) if key in missing else _apply(observed, manifest)
        for key, manifest in wanted.items()
        if key in missing or key in observed.drifted
    ]
    writes.sort(key=lambda write: write.manifest["kind"] != "NetworkPolicy")
    return tuple(writes)


def _manifests(training: TrainingResource, settings: OperatorSettings) -> dict[ChildKey, KubeObject]:
    """Return every child except RayJobs and the ConfigMaps of messages, by kind and name."""
    manifests = all_objects.always(training, settings, config_map(training))
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}


def order_to_stop(
    observed: Observed, training: TrainingResource, attempt: int, order: StopOrder
) -> tuple[ClusterWrite, ...]:
    """Return the write that adds an order to stop to the `-control` message, and keeps the rest of the message.

    Returns no write if the message already contains the order.
    """
    current = observed.control if observed.control is not None and observed.control.attempt == attempt else None
    control = (current or control_message(training, attempt, 0)).model_copy(update={"stop": order})
    write = ensure_child(observed, message_config_maps.control(training, control))
    return () if write is None else (write,)


def control_message(
    training: TrainingResource,
    attempt: int,
    rollout_nodes: int,
    leaving: tuple[str, ...] = (),
    leaving_since: float | None = None,
) -> Control:
    """Return the `-control` message to an attempt that is not ordered to stop.

    rollout_nodes: the number of nodes that the rollout pool should have. leaving: names of the pods that are removed
    next. leaving_since: Unix time; all messages since then have named all of these pods.
    """
    spec = training.spec
    live = LiveSettings(
        checkpointEveryUpdates=spec.checkpoint.everyUpdates,
        checkpointKeep=spec.checkpoint.keep,
        evaluationEveryUpdates=spec.evaluation.everyUpdates,
        checkpointExport=spec.checkpoint.export,
    )
    return Control(attempt=attempt, rolloutNodes=rollout_nodes, leaving=leaving, leavingSince=leaving_since, live=live)


def ensure_child(observed: Observed, manifest: KubeObject) -> Create | Apply | None:
    """Return the write that creates the object or applies it again; None if there is nothing to write.

    An object without a hash is only created: its content belongs to the trainer. An object that the operator wants to change is
    applied immediately; one that somebody else has changed, when `drift` says so.
    """
    key = manifest["kind"], manifest["metadata"]["name"]
    child = observed.children.get(key)
    if child is None:
        return Create(manifest)
    desired_hash = manifest["metadata"].get("annotations", {}).get(object_names.HASH)
    if desired_hash is None:
        return None
    written = child.hash if child.own_write is None else child.own_write.hash
    return _apply(observed, manifest) if key in observed.drifted or written != desired_hash else None


def _apply(observed: Observed, manifest: KubeObject) -> Apply:
    child = observed.children[manifest["kind"], manifest["metadata"]["name"]]
    return Apply(manifest, child.uid)
