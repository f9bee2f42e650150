"""A training in pods that keeps its checkpoints, on one epoch of its own prompts, so that each prompt can be accounted for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35_trainer.contract import Progress, parse_progress
from qwen35_trainer.progress.records import UpdateRecord, read_records, surviving_updates
from tests.cluster.cluster import Cluster
from tests.cluster.volume import claim
from tests.controlplane.story import Story

PER_UPDATE = 8
CLAIM = "shared"


@dataclass(frozen=True)
class PodTraining(Story):
    """As in the control plane's tests, but that everything in it is real."""

    updates: int = 0
    folder: Path = Path()
    """Of the claim."""

    @classmethod
    def begin(cls, cluster: Cluster, namespace: str, name: str, updates: int, **sections: Any) -> "PodTraining":
        """Creates it: `updates` updates, which are one epoch; checkpoints every 5."""
        folder = claim(cluster, namespace, CLAIM)
        lines = (f'{{"prompt": "{number}>", "answer": "{number % 10}"}}\n' for number in range(updates * PER_UPDATE))
        (folder / "train.jsonl").write_text("".join(lines))
        volume = {"persistentVolumeClaim": {"claimName": CLAIM}}
        shape = {"hiddenSize": 256, "intermediateSize": 512, "layers": 4, "attentionHeads": 8, "headDim": 32}
        training = cls(cluster, namespace, name, updates, folder)
        training.apply(
            model={"name": "tiny", "precision": "FP32", "source": {"random": shape | {"characters": "0123456789>"}}},
            data={
                "train": [{"name": "train", "files": {"paths": ["train.jsonl"], "volume": volume}}],
                "maxPromptTokens": 8,
                "maxResponseTokens": 48,
            },
            algorithm={"groupSize": 8},
            rollout={"nodes": 1, "minNodes": 1, "maxNodes": 2, "maxSequences": 64},
            train={"nodes": 1, "batch": {"promptsPerUpdate": PER_UPDATE, "microBatchPerDevice": 64}},
            checkpoint={"everyUpdates": 5, "keep": 2, "storage": volume, "graceSeconds": 120},
            **sections,
        )
        return training

    @property
    def update(self) -> int:
        """The last one that the operator has heard of."""
        return int(self.status.get("progress", {}).get("update", 0))

    def progress(self) -> Progress:
        """The trainer's own report."""
        return parse_progress(self.get("configmaps", f"{self.name}-progress")["data"]["progress.json"])

    def reported(self, attempt: int) -> int:
        """The last update that this attempt has told of, its checkpoint's among them; 0 before it says anything."""
        progress = self.progress()
        return progress.update if progress.attempt == attempt else 0

    def generating(self) -> set[str]:
        """Pods of the replicas that the trainer works with."""
        return {pod for replica in self.progress().replicas for pod in replica.pods}

    def until_trained(self, more: int = 3) -> None:
        """Until it has trained so many updates more than now."""
        goal = self.update + more
        self.until(lambda: self.update >= goal, f"update {goal}")

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def trained(self) -> list[UpdateRecord]:
        """The updates that count: those of an attempt that went on from an earlier checkpoint stand for their first try."""
        return list(surviving_updates(read_records(self.run / "metrics.jsonl")))

    def last_progress(self) -> dict[str, Any]:
        """Where its last checkpoint says that the run stands."""
        newest = max((self.folder / "checkpoints" / self.name).glob("update-*"))
        return dict(json.loads((newest / "progress.json").read_text()))

    def delete_pod(self, pool: str, *, grace: int = 0) -> str:
        """Without grace as when a node is gone. Returns its name."""
        (name, *_) = self.pods(pool)
        self.kubectl("delete", "pod", name, f"--grace-period={grace}", *(["--force"] if grace == 0 else []))
        return name

    def delete_and_see_that_nothing_is_left(self) -> None:
        self.kubectl("delete", "qwen35training", self.name, "--ignore-not-found")
        kinds = "pods,services,jobs,configmaps,serviceaccounts,roles,rolebindings,networkpolicies,rayjobs,rayclusters"
        made_by_kubernetes = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
        self.until(
            lambda: set(self.kubectl("get", kinds, "--output=name").split()) == made_by_kubernetes,
            "nothing is left",
        )
