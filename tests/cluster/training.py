"""A training in pods that keeps its checkpoints, on one epoch of its own prompts, so that each prompt can be accounted for.

It has two train pods in one process group, and a user's reward function that lies on the claim.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from qwen35_trainer.contract import ProgressReport, parse_progress
from qwen35_trainer.contract.shared_names import DATA_FOLDER
from qwen35_trainer.data.prompt_set import PromptOrder
from qwen35_trainer.pipeline.journal import recover
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import RunRecord, UpdateRecord, surviving_updates
from qwen35_trainer.runtime.checkpoint_store import load
from tests.cluster import patient_judge
from tests.cluster.cluster import Cluster
from tests.cluster.volume import claim
from tests.controlplane.live_training import LiveTraining

PROMPTS, GROUP = 4, 4
"""Of an update; samples of a prompt."""
HELD_OUT = 8
"""Prompts with which it is evaluated, before and after training."""
ANSWER, LEARNING_RATE = "7", 4e-3
"""To all prompts: that is learned in about twenty updates at this rate."""
TRAIN_PODS = 2
QUICK, SLOW = 0.1, 0.5
"""Seconds that the judge takes for an answer, of which an update needs 16: while a test waits for updates, and otherwise."""
CLAIM = "shared"
# All pods together fit a node of two cores and little memory; limits, from which Ray derives its size, are the profile's.
SMALL = {"spec": {"containers": [{"name": "ray", "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}}}]}}


@dataclass(frozen=True)
class PodTraining(LiveTraining):
    """As in the control plane's tests, but that everything in it is real."""

    updates: int = 0
    folder: Path = Path()
    """Of the claim."""
    pause: ClassVar[float] = 0.5
    """Pods take seconds, and each question costs the API server as much as it costs here."""

    @classmethod
    def begin(
        cls,
        cluster: Cluster,
        namespace: str,
        name: str,
        updates: int,
        checkpoint: Mapping[str, Any] | None = None,
        pods: Mapping[str, Any] | None = None,
        **sections: Any,
    ) -> "PodTraining":
        """Creates it: `updates` updates, which are one epoch; checkpoints every 5, unless `checkpoint` says otherwise.

        pods: further fields of spec.pods.
        """
        folder = claim(cluster, namespace, CLAIM)
        count = updates * PROMPTS
        _write_prompts(folder / "train.jsonl", range(count))
        _write_prompts(folder / "validation.jsonl", range(count, count + HELD_OUT))
        shutil.copy(patient_judge.__file__, folder)
        _set_pace(folder, QUICK)
        volume = {"persistentVolumeClaim": {"claimName": CLAIM}}
        training = cls(cluster, namespace, name, updates, folder)
        training.apply(
            data={
                part: [{"name": part, "files": {"paths": [f"{part}.jsonl"], "volume": volume}}]
                for part in ("train", "validation")
            }
            | {"maxPromptTokens": 8, "maxResponseTokens": 8},
            rewards=[
                {"type": "Function", "function": "patient_judge:digit", "timeoutSeconds": 60, "onError": "Fail"},
            ],
            algorithm={"groupSize": GROUP},
            rollout={"nodes": 1, "minNodes": 1, "maxNodes": 2, "maxSequencesPerReplica": 16},
            train={
                "nodes": TRAIN_PODS,
                "batch": {"promptsPerUpdate": PROMPTS, "microBatchSequences": 8},
                "optimizer": {"learningRate": LEARNING_RATE},
            },
            checkpoint={"everyUpdates": 5, "keep": 2, "storage": volume, "graceSeconds": 120} | dict(checkpoint or {}),
            pods={"env": [{"name": "PYTHONPATH", "value": f"{DATA_FOLDER}/{CLAIM}"}]}
            | dict.fromkeys(("head", "rollout", "train"), SMALL)
            | dict(pods or {}),
            **sections,
        )
        return training

    @property
    def update(self) -> int:
        """The last one that the operator has heard of."""
        return int(self.status.get("progress", {}).get("update", 0))

    def progress(self) -> ProgressReport | None:
        """The trainer's own report; None before the first."""
        config_map = self.find("configmaps", f"{self.name}-progress") or {}
        text = config_map.get("data", {}).get("progress.json")
        return None if text is None else parse_progress(text)

    def reported(self, attempt: int | None = None) -> int:
        """Return the last update that this attempt, or any, has reported, including that of its checkpoint; 0 before the first."""
        progress = self.progress()
        return progress.update if progress is not None and attempt in (None, progress.attempt) else 0

    def generating(self) -> set[str]:
        """Pods of the replicas that the trainer works with."""
        progress = self.progress()
        return set() if progress is None else {pod for replica in progress.replicas for pod in replica.pods}

    @contextmanager
    def quick(self) -> Iterator[None]:
        """Let the training make an update in about two seconds instead of ten: the body waits for updates."""
        _set_pace(self.folder, QUICK)
        yield
        _set_pace(self.folder, SLOW)

    def until_trained(self, more: int = 3) -> None:
        """Wait until the training has done this number of further updates."""
        goal = self.reported() + more
        with self.quick():
            self.until(lambda: self.reported() >= goal, f"update {goal}")

    def until_saved(self) -> None:
        """Wait until there is a checkpoint."""
        with self.quick():
            self.until(lambda: "lastCheckpoint" in self.status, "a checkpoint")

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def checkpoint(self) -> Path:
        """The last one."""
        return max((self.folder / "checkpoints" / self.name).glob("update-*"))

    def records(self) -> Iterator[RunRecord]:
        """Read the records of all attempts."""
        return iter(read_records(self.run / "metrics.jsonl"))

    def trained(self) -> list[UpdateRecord]:
        """Return the updates that count: those repeated from an earlier checkpoint replace the first ones."""
        return list(surviving_updates(self.records()))

    def assert_each_prompt_trained_once(self, updates: int) -> None:
        """Check the records, the last checkpoint, its journal, and the calls of the user's reward function."""
        assert [record.update for record in self.trained()] == list(range(1, updates + 1))
        end = load(self.checkpoint).progress
        begun, pending = set(range(end.position)), set(end.pending)
        assert end.update == updates
        assert len(pending) == len(end.pending)
        assert pending <= begun
        # Prompts that were under way at the end are left over.
        assert len(begun - pending) == updates * PROMPTS, "a prompt is missing, or came twice"
        recovered = recover((self.run / "journal").read_bytes(), end.batch)
        assert (recovered.position, set(recovered.pending)) == (end.position, pending)
        order = PromptOrder(self.updates * PROMPTS)
        judged = Counter(line["row"] for line in map(json.loads, (self.run / "judged.jsonl").read_text().splitlines()))
        assert min(judged[order.prompt_index(position)] for position in begun - pending) >= GROUP

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


def _write_prompts(file: Path, rows: range) -> None:
    """Write prompts with these numbers, by which the judge records them."""
    prompts = ({"prompt": f"{row}", "answer": ANSWER, "row": row} for row in rows)
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def _set_pace(folder: Path, seconds: float) -> None:
    """Set the judge's pace. folder: of the claim, where the judge may be reading the file."""
    written = folder / "seconds-per-answer.writing"
    written.write_text(str(seconds))
    written.rename(folder / patient_judge.PACE.name)
