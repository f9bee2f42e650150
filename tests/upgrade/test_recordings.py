"""What earlier versions left behind can be read and continued: by this operator, and by this trainer."""

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import Condition, TrainingStatus
from qwen35_operator.desired.object_names import SPEC_HASH
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_operator.kube.kinds import WATCHED, WRITTEN, watched_as
from qwen35_operator.kube.object_cache import ObjectCache
from qwen35_operator.kube.object_parsing import record, training_of
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_operator.reconcile.decide import decide
from qwen35_operator.reconcile.decision import Decision
from qwen35_operator.reconcile.observe import TrainingParser, observe
from qwen35_operator.reconcile.writes import Apply, Create, Delete
from qwen35_trainer.contract import parse_control, parse_progress
from qwen35_trainer.contract.shared_names import DATA_FOLDER
from qwen35_trainer.epoch import read_owner
from qwen35_trainer.manifest import ManifestError, load_manifest, parse_spec
from qwen35_trainer.pipeline.journal import recover
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import CheckpointRecord, UpdateRecord, surviving_updates
from qwen35_trainer.runtime.checkpoint_store import CONTENTS_FILE, MANIFEST_FILE, CheckpointStore, load
from qwen35_trainer.runtime.export_command import export
from tests.controlplane import operator_process
from tests.operator.kube.memory_api import MemoryApi
from tests.upgrade.recording import Recording, recordings

EARLIER_LANE = {"nodes": 2, "minNodes": 1, "stragglerLane": {"nodes": 1, "tensorParallel": 1, "afterTokens": 8}}
"""A lane that fills minNodes, has no larger replicas, and begins where responses end."""
NEW_REFUSALS = [
    "spec.rollout.minNodes",
    "spec.rollout.stragglerLane.tensorParallel",
    "spec.rollout.stragglerLane.afterTokens",
]


def of(name: str) -> pytest.MarkDecorator:
    """Give the test each version's recording of the training of this name."""
    chosen = [recording for recording in recordings() if recording.name == name]
    return pytest.mark.parametrize("recording", chosen, ids=lambda recording: recording.version)


@pytest.fixture(params=recordings(), ids=lambda recording: f"{recording.version}-{recording.name}")
def recording(request: pytest.FixtureRequest) -> Recording:
    return request.param


async def decision(recording: Recording, client: MemoryApi) -> Decision:
    """What this operator decides when it starts at the moment of the recording."""
    cache = ObjectCache((), lambda key: None, lambda kind: None)
    for kind in WATCHED:
        for body in recording.objects.get(kind.name, ()):  # an earlier release has no objects of a later kind
            if training_of(body) == recording.name and watched_as(WRITTEN.get(kind.name, kind), body) == kind:
                cache.stores[kind].put(training_of(body), record(kind, body))
    client.time = recording.time
    observed = await observe(recording.training, cache, TrainingParser(), client)
    return decide(observed, OperatorSettings(), recording.time)


def test_there_is_a_running_and_a_finished_training_of_each_version() -> None:
    names = {(recording.version, recording.name) for recording in recordings()}
    versions = {version for version, _ in names}
    assert versions
    assert names == {(version, name) for version in versions for name in ("running", "finished")}


def test_its_manifest_has_no_problems(recording: Recording) -> None:
    spec, problems = parse_spec(recording.training["spec"])
    assert (spec is not None, problems) == (True, [])


def test_its_status_is_read_without_loss(recording: Recording) -> None:
    status = recording.training["status"]
    read = TrainingStatus.model_validate(status)
    assert read.model_dump(mode="json", by_alias=True, exclude_unset=True) == status


def test_the_messages_between_operator_and_trainer_are_read(recording: Recording) -> None:
    report = parse_progress(recording.config_map("progress")["progress.json"])
    control = parse_control(recording.config_map("control")["control.json"])
    attempts = recording.training["status"]["attempts"]
    assert (report.attempt, control.attempt) == (len(attempts), len(attempts))
    assert report.checkpoint is not None
    assert report.checkpoint.update == recording.training["status"]["lastCheckpoint"]["update"]


def test_the_operator_may_bind_the_role_that_the_release_before_wrote() -> None:
    """An operator can bind only a Role whose permissions it has. It has `update` for no other reason, and only as long."""
    [role] = recordings()[-1].objects["Role"]
    bound = {verb for rule in role["rules"] for verb in rule["verbs"]}
    held = {verb for rule in operator_process.rules() if "configmaps" in rule["resources"] for verb in rule["verbs"]}
    assert bound <= held
    assert ("update" in held) == ("update" in bound)


@of("running")
async def test_a_running_training_continues_undisturbed_under_this_operator(recording: Recording) -> None:
    decided = await decision(recording, MemoryApi())
    disturbing = [write for write in decided.writes if isinstance(write, Delete | Create)]
    assert not disturbing
    before = TrainingStatus.model_validate(recording.training["status"])
    assert decided.status.state == "Running"
    assert [attempt.outcome for attempt in decided.status.attempts] == ["Failed", "Running"]
    # Its release did not record since when an attempt is active.
    assert decided.status.attempts[-1].activeSince == before.attempts[-1].startTime
    recorded = (attempt.model_copy(update={"activeSince": None}) for attempt in decided.status.attempts)
    assert tuple(recorded) == before.attempts
    assert decided.status.lastCheckpoint == before.lastCheckpoint


def with_later_fields(recording: Recording) -> Recording:
    """The recording with fields that a later version has added to the spec and to the status."""
    later = deepcopy(recording)
    spec, status = later.training["spec"], later.training["status"]
    for place in (spec, spec["train"], spec["data"]["train"][0], status, *status.get("attempts", [])):
        place["fieldOfALaterVersion"] = {"count": 0}
    return later


def condition(decided: Decision, kind: str) -> Condition:
    [matching] = [condition for condition in decided.status.conditions if condition.type == kind]
    return matching


async def test_a_training_with_fields_of_a_later_version_continues(recording: Recording) -> None:
    """The definition is upgraded before the operator. A release that is taken back may leave its definition, and leaves its status."""
    before = await decision(recording, MemoryApi())
    now = await decision(with_later_fields(recording), MemoryApi())
    assert now.writes == before.writes
    accepted = condition(now, "Accepted")
    assert (accepted.status, accepted.reason) == ("True", "Accepted")
    if recording.name == "running":
        unread = set(accepted.message.partition("does not use its fields: ")[2].split(", "))
        assert unread == {f"spec.{place}fieldOfALaterVersion" for place in ("", "train.", "data.train[0].")}
    others = [(condition.type, condition.status, condition.reason) for condition in before.status.conditions]
    assert [(condition.type, condition.status, condition.reason) for condition in now.status.conditions] == others
    assert now.status.attempts == before.status.attempts


@of("running")
async def test_an_attempt_that_a_later_version_started_with_its_own_fields_is_not_ended(recording: Recording) -> None:
    """Its hash, which contains the fields, cannot be compared."""
    later = with_later_fields(recording)
    [job] = later.objects["RayJob"]
    job["metadata"]["annotations"][SPEC_HASH] = "hash-of-a-later-version"
    decided = await decision(later, MemoryApi())
    assert decided.writes == (await decision(recording, MemoryApi())).writes
    assert decided.status.attempts[-1].outcome == "Running"


@of("running")
async def test_a_training_with_fields_of_a_later_version_can_be_suspended(recording: Recording) -> None:
    later = with_later_fields(recording)
    later.training["spec"]["suspend"] = True
    decided = await decision(later, MemoryApi())
    assert decided.status.state == "Suspending"
    assert any(isinstance(write, Apply) for write in decided.writes)


@of("running")
async def test_a_new_training_with_fields_of_a_later_version_is_refused(recording: Recording) -> None:
    """Its user may have set them, and nothing is lost by waiting for the operator that knows them."""
    new = with_later_fields(recording)
    new.training["status"] = {}
    new.objects["RayJob"].clear()
    decided = await decision(new, MemoryApi())
    accepted = condition(decided, "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "Invalid")
    refused = "spec.train.fieldOfALaterVersion: the operator does not know this field: the installed CRD is that of a later release."
    assert refused in accepted.message


@of("running")
async def test_a_running_training_with_a_lane_that_only_that_version_accepts_continues(recording: Recording) -> None:
    """The recorded training, with a straggler lane that this version refuses in a new training for each of its reasons."""
    recording = deepcopy(recording)
    spec = recording.training["spec"]
    spec["rollout"] |= EARLIER_LANE
    parsed, problems = parse_spec(spec, new=False)
    assert parsed is not None
    assert not problems
    training = TrainingResource(recording.name, "team", "0", 1, parsed)
    [job] = recording.objects["RayJob"]
    job["metadata"]["annotations"][SPEC_HASH] = spec_hash(training)
    decided = await decision(recording, MemoryApi())
    assert not [write for write in decided.writes if isinstance(write, Delete | Create)]
    assert (decided.status.state, decided.status.attempts[-1].outcome) == ("Running", "Running")
    assert {condition.type: condition.status for condition in decided.status.conditions}["Accepted"] == "True"
    new = deepcopy(recording)
    new.training["status"] = {}
    new.objects["RayJob"].clear()
    refused = (await decision(new, MemoryApi())).status.conditions
    [accepted] = [condition for condition in refused if condition.type == "Accepted"]
    assert [accepted.status, *re.findall(r"spec[\w.]+(?=: )", accepted.message)] == ["False", *NEW_REFUSALS]


@of("finished")
async def test_a_finished_training_stays_finished_under_this_operator(recording: Recording) -> None:
    decided = await decision(recording, MemoryApi())
    assert [write for write in decided.writes if not isinstance(write, Delete)] == []
    assert decided.status == TrainingStatus.model_validate(recording.training["status"])


def test_its_records_and_its_manifest_are_read(recording: Recording) -> None:
    records = read_records(recording.run / "metrics.jsonl")
    updates = [update.update for update in surviving_updates(records)]
    assert updates == list(range(1, len(updates) + 1))
    assert len(updates) >= recording.training["status"]["lastCheckpoint"]["update"]
    assert any(isinstance(each, CheckpointRecord) for each in records)
    assert load_manifest(recording.run / "run.yaml").metadata.name == recording.name


def test_its_newest_checkpoint_is_complete_and_its_journal_continues_from_there(recording: Recording) -> None:
    newest = CheckpointStore(recording.checkpoints, 1).latest()
    assert newest is not None
    saved = newest.progress
    recovered = recover((recording.run / "journal").read_bytes(), saved.batch)
    assert recovered.batch == saved.batch
    # Groups that were dispatched after the checkpoint was requested are pending in the journal only.
    later = range(saved.position, recovered.position)
    assert set(recovered.pending) == {*saved.pending, *later}
    owner = read_owner(recording.checkpoints)
    assert owner is not None
    assert owner.run == f"{recording.training['metadata']['namespace']}/{recording.name}"


@of("finished")
def test_the_export_of_a_recorded_checkpoint_equals_the_recorded_export(recording: Recording, tmp_path: Path) -> None:
    [exported] = (recording.checkpoints / "exports").iterdir()
    [checkpoint] = recording.checkpoints.glob("update-*")
    again = export(checkpoint, tmp_path / "model").folder
    assert {file.name: file.read_bytes() for file in again.iterdir()} == {
        file.name: file.read_bytes() for file in exported.iterdir()
    }


@of("finished")
def test_a_checkpoint_with_a_lane_that_only_that_version_accepts_is_exported(
    recording: Recording, tmp_path: Path
) -> None:
    [saved] = recording.checkpoints.glob("update-*")
    checkpoint = tmp_path / saved.name
    shutil.copytree(saved, checkpoint)
    manifest = yaml.safe_load((checkpoint / MANIFEST_FILE).read_text())
    manifest["spec"]["rollout"] |= EARLIER_LANE
    (checkpoint / MANIFEST_FILE).write_text(json.dumps(manifest))
    contents = json.loads((checkpoint / CONTENTS_FILE).read_text())
    contents[MANIFEST_FILE] = (checkpoint / MANIFEST_FILE).stat().st_size
    (checkpoint / CONTENTS_FILE).write_text(json.dumps(contents))
    assert export(checkpoint, tmp_path / "model").update == load(checkpoint).progress.update
    with pytest.raises(ManifestError) as refused:
        load_manifest(checkpoint / MANIFEST_FILE)
    assert [problem.path for problem in refused.value.problems] == NEW_REFUSALS


@of("running")
@pytest.mark.processes
def test_the_recorded_run_trains_on_from_its_checkpoint(recording: Recording, tmp_path: Path, local) -> None:
    """The weights, the optimizer's state, the random states and the position in the data are this version's to continue."""
    shutil.copytree(recording.claim, tmp_path, dirs_exist_ok=True)
    [checkpoint] = (tmp_path / "checkpoints" / recording.name).glob("update-*")
    saved = load(checkpoint).progress
    # The data lie elsewhere here. The new path has the same length, because the checkpoint records the sizes of its files.
    stored = checkpoint / MANIFEST_FILE
    stored.write_text(stored.read_text().replace(f"{DATA_FOLDER}/shared/", "./" * (len(f"{DATA_FOLDER}/shared/") // 2)))
    manifest = yaml.safe_load(stored.read_text())
    spec = manifest["spec"]
    spec["rewards"] = [{"type": "ExactMatch"}]  # the user's function is not installed
    spec["train"] |= {"updates": saved.update + 2, "nodes": 1}  # two recorded ranks continue as one
    del spec["checkpoint"]["storage"]
    file = tmp_path / "again.yaml"
    file.write_text(json.dumps(manifest))
    ended = local.run(file, "--resume", checkpoint)
    assert ended.code == 0, ended.err
    assert [update.update for update in ended.of(UpdateRecord)] == [saved.update + 1, saved.update + 2]
