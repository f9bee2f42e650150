"""Nodes without machines: the scheduler, the controller that reacts to taints, and kubelets, which do what kwok does.

A pod runs and is ready as soon as a node takes it. Devices are not counted: what they limit is tested on the real scheduler.
"""

from collections.abc import Iterator
from typing import Any

from tests.virtual.api_server import disrupt
from tests.virtual.controllers import Controller
from tests.virtual.stored_objects import Stored


class Scheduler(Controller):
    """Binds each pod to the first node that its selector and its tolerations allow."""

    kinds = ("pods", "nodes")

    def look(self) -> None:
        nodes = self.of("nodes")
        for pod in self.of("pods"):
            if pod.body["spec"].get("nodeName") or "deletionTimestamp" in pod.metadata:
                continue
            node = next((node for node in nodes if _fits(pod, node)), None)
            if node is None:
                self._report_unschedulable(pod)
                continue
            body = pod.copy()
            body["spec"]["nodeName"] = node.metadata["name"]
            self.server.replace(pod, body, manager="scheduler")

    def _report_unschedulable(self, pod: Stored) -> None:
        message = "0 nodes are available: node(s) didn't match Pod's node affinity/selector."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        status = pod.body.get("status", {})
        if not any(item["type"] == "PodScheduled" for item in status.get("conditions", ())):
            times = {"lastTransitionTime": self.server.now}
            self.write_status(pod, {**status, "phase": "Pending", "conditions": [condition | times]})


class TaintEviction(Controller):
    """Deletes the pods of a node that has a taint NoExecute which they do not tolerate."""

    kinds = ("pods", "nodes")

    def look(self) -> None:
        tainted = {node.metadata["name"]: node for node in self.of("nodes") if list(_taints(node, "NoExecute"))}
        for pod in self.of("pods"):
            node = tainted.get(pod.body["spec"].get("nodeName", ""))
            if node is None or "deletionTimestamp" in pod.metadata or _tolerates(pod, node, "NoExecute"):
                continue
            disrupt(self.server, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
            self.delete(pod)


class Kubelets(Controller):
    """Start the containers of pods that are on a node, and confirm the end of deleted pods."""

    kinds = ("pods",)

    def look(self) -> None:
        for pod in self.of("pods"):
            if not pod.body["spec"].get("nodeName"):
                continue
            if "deletionTimestamp" in pod.metadata:
                self.delete(pod, gracePeriodSeconds=0)
            elif pod.body.get("status", {}).get("phase", "Pending") == "Pending":
                self.write_status(pod, self._running(pod))

    def _running(self, pod: Stored) -> dict[str, Any]:
        now, spec = self.server.now, pod.body["spec"]
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        running = {"ready": True, "started": True, "restartCount": 0, "state": {"running": {"startedAt": now}}}
        containers = [{"name": item["name"], "image": item.get("image", "")} | running for item in spec["containers"]]
        times = {"startTime": now, "podIP": "10.0.0.1"}
        return {"phase": "Running", "conditions": conditions, "containerStatuses": containers} | times


def _fits(pod: Stored, node: Stored) -> bool:
    labels = node.metadata.get("labels", {})
    selector = pod.body["spec"].get("nodeSelector") or {}
    selected = all(labels.get(key) == value for key, value in selector.items())
    return selected and _tolerates(pod, node, "NoSchedule") and _tolerates(pod, node, "NoExecute")


def _taints(node: Stored, effect: str) -> Iterator[dict[str, Any]]:
    return (taint for taint in node.body.get("spec", {}).get("taints") or () if taint["effect"] == effect)


def _tolerates(pod: Stored, node: Stored, effect: str) -> bool:
    tolerations = pod.body["spec"].get("tolerations") or ()

    def tolerated(taint: dict[str, Any]) -> bool:
        return any(
            item.get("key", taint["key"]) == taint["key"]
            and item.get("effect", effect) == effect
            and (item.get("operator") == "Exists" or item.get("value") == taint.get("value"))
            for item in tolerations
        )

    return all(tolerated(taint) for taint in _taints(node, effect))
