"""The input of a decision: one training and its child objects, as plain frozen data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import TrainingStatus
from qwen35_operator.desired.object_names import LAST_CHECKPOINT
from qwen35_operator.kube.object_records import Child, OwnWrite, Pod, RayCluster, RayJob
from qwen35_trainer.contract import Control, ProgressReport
from qwen35_trainer.manifest import Problem

type NodeState = Literal["Exists", "Gone", "OutOfService", "Unreadable"]
"""State of a Kubernetes node, as far as it proves that the node's pods have ended.

OutOfService: somebody has confirmed with the taint node.kubernetes.io/out-of-service that nothing runs there.
Unreadable: the operator may not read nodes.
"""

type ChildKey = tuple[str, str]
"""Kind and name of a child, such as ("ConfigMap", "demo-progress")."""


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The result of parsing the trainer's report, which is a text in the ConfigMap `-progress`.

    Either `progress` has the report, or `problem` says why the text cannot be parsed. The other one is None.
    """

    progress: ProgressReport | None
    problem: str | None
    written: datetime | None
    """When `-progress` was last written, by the API server's clock; None if managedFields does not contain the time."""


@dataclass(frozen=True)
class Observed:
    """Everything that a decision may depend on, apart from the operator's settings and the time."""

    training: TrainingResource | None
    """The training with its parsed spec; None if the spec could not be read, for the reasons in `problems`."""
    name: str
    namespace: str
    uid: str
    generation: int
    version: str
    """resourceVersion of the training.

    It is sent with the status, so that the API server refuses the status (409 Conflict) if the training has changed.
    """
    created: datetime
    deleting: bool
    status: TrainingStatus
    finalizers: tuple[str, ...] = ()
    retry: str = ""
    """Value of the training's annotation RETRY; empty if it has none."""
    update_request: str = ""
    """Value of the training's annotation UPDATE; empty if it has none."""
    problems: tuple[Problem, ...] = ()
    unavailable: tuple[Problem, ...] = ()
    """A problem for each kind that cannot be watched, for example because KubeRay is missing. If there are any, the
    operator changes nothing but the status."""
    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    """All children of the training except RayJobs, by kind and name."""
    drifted: frozenset[ChildKey] = frozenset()
    """Children that somebody may have changed since the operator last wrote them."""
    repair_after: float | None = None
    """Seconds until further children have to be checked for drift; None if no further child has changed."""
    unrepaired: tuple[tuple[str, str], ...] = ()
    """Reason and message of the latest repair of each child whose repair has failed."""
    budget_try: OwnWrite | None = None
    """The latest try to create or delete the PodDisruptionBudget, if the API server has refused it."""
    limitations: tuple[Problem, ...] = ()
    """A problem for each optional kind that cannot be watched (`kinds.OPTIONAL`)."""
    jobs: tuple[RayJob, ...] = ()
    clusters: tuple[RayCluster, ...] = ()
    pods: tuple[Pod, ...] = ()
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    """States of Kubernetes nodes, by name: only nodes with pods that were deleted and whose end is not confirmed."""
    force_start: str = ""
    """Value of the training's annotation FORCE_START; empty if it has none."""
    report: ReadReport | None = None
    """The parsed ConfigMap `-progress`; None while it is absent or empty."""
    reports_since: datetime | None = None
    """Since when the trainer's reports can be seen: since this process leads and its cache is complete, by the API server's clock.

    While the API server is away, no report arrives, and no process leads. None if the time is unknown.
    """
    control: Control | None = None
    """The operator's last message in `-control`; None while it is absent, empty or unreadable."""
    running: int = 0
    """Number of all trainings of this operator whose state is Running."""

    @property
    def saves_before_deletion(self) -> bool:
        """Whether the training is being deleted, and its user wants a last checkpoint first."""
        return self.deleting and LAST_CHECKPOINT in self.finalizers
