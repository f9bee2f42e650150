import os
import secrets
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from qwen35_trainer.epoch import FolderRefused, Owner, read_owner, take
from qwen35_trainer.manifest import Manifest, load_manifest
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.owner import Claim


@pytest.fixture
def manifest(write, tmp_path) -> Manifest:
    return load_manifest(write(tmp_path / "manifest"))


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "out")


OWNER = Owner("run", "attempt", "host", "output")


def claim(folder: RunFolder, manifest: Manifest, *, resume: bool = False) -> None:
    """Claim the folder as an attempt does that ends immediately."""
    epoch = take(folder.root, replace(OWNER, attempt=secrets.token_hex(4)), read_owner(folder.root))
    folder.claim(manifest, epoch, folder.next_identity(manifest, resume=resume), resume=resume)
    epoch.end()


def test_a_folder_that_does_not_exist_is_fine_and_stays_absent(folder, manifest):
    folder.check(manifest, resume=False)
    assert not folder.root.exists()


def test_a_claimed_folder_says_whose_it_is(folder, manifest):
    claim(folder, manifest)
    assert load_manifest(folder.manifest) == manifest
    assert folder.identity.startswith("tiny-")


def test_a_run_keeps_its_identity_when_it_is_resumed(folder, manifest):
    claim(folder, manifest)
    before = folder.identity
    folder.check(manifest, resume=True)
    claim(folder, manifest, resume=True)
    assert folder.identity == before


def test_a_file_is_not_a_folder(folder, manifest):
    folder.root.write_text("mine")
    with pytest.raises(FolderRefused, match="out is a file; name a folder"):
        folder.check(manifest, resume=False)
    assert folder.root.read_text() == "mine"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_with_other_files_is_left_alone(folder, manifest, resume):
    folder.root.mkdir()
    (folder.root / "thesis.tex").touch()
    with pytest.raises(FolderRefused, match="holds files that do not belong to a run; name a new or empty folder"):
        folder.check(manifest, resume=resume)
    assert [path.name for path in folder.root.iterdir()] == ["thesis.tex"]


EVALUATED = '{"record":"evaluation","update":0,"version":0,"time":1.0,"samples":4,"accuracy":0.0}\n'
TRAINED = {
    "an update": lambda folder: folder.metrics.write_text(f'{EVALUATED}{{"record":"update","update":1}}\n'),
    "a checkpoint": lambda folder: (folder.checkpoints / "update-000001").mkdir(parents=True),
    "half a checkpoint": lambda folder: (folder.checkpoints / ".update-000001.partial").mkdir(parents=True),
}


@pytest.mark.parametrize("leftover", TRAINED)
def test_what_an_earlier_run_has_trained_is_continued_or_left_alone(folder, manifest, leftover):
    claim(folder, manifest)
    TRAINED[leftover](folder)
    command = "qwen35 run mine.yaml --resume auto"
    with pytest.raises(
        FolderRefused, match=f"holds an earlier run; name another folder, or continue it with:\n  {command}"
    ):
        folder.check(manifest, resume=False, how_to_resume=command)


def test_a_folder_in_which_nothing_was_trained_is_used_by_the_corrected_manifest(folder, manifest, write, tmp_path):
    claim(folder, manifest)
    folder.metrics.write_text(EVALUATED)
    folder.journal.touch()
    folder.samples.touch()
    folder.summary.touch()
    (folder.root / "report.html").touch()
    folder.logs.mkdir()
    (folder.logs / "driver.log").write_text("why it failed")
    identity = folder.identity
    corrected = load_manifest(write(tmp_path / "corrected", {"model.source.random.layers": 4}))
    folder.check(corrected, resume=False)
    assert folder.metrics.exists()
    claim(folder, corrected)
    assert load_manifest(folder.manifest) == corrected
    assert folder.identity != identity, "metric services would continue the run that failed"
    assert sorted(path.name for path in folder.root.iterdir()) == ["logs", "owner.json", "run.id", "run.yaml"]
    assert (folder.logs / "driver.log").read_text() == "why it failed"


def test_a_corrected_manifest_resumes_in_a_folder_in_which_nothing_was_trained(folder, manifest, write, tmp_path):
    """The attempts of a training always resume, also those of one that was deleted and applied again under its name."""
    claim(folder, manifest)
    folder.metrics.write_text(EVALUATED)
    folder.journal.write_text("prompts of other data")
    corrected = load_manifest(write(tmp_path / "corrected", {"model.source.random.layers": 4}))
    folder.check(corrected, resume=True, in_cluster=True)
    claim(folder, corrected, resume=True)
    assert load_manifest(folder.manifest) == corrected
    assert sorted(path.name for path in folder.root.iterdir()) == ["owner.json", "run.id", "run.yaml"]


@pytest.mark.parametrize("file", ["run.yaml", "run.id"])
def test_a_killed_claim_of_a_corrected_manifest_leaves_no_records_of_the_other_one(
    folder, manifest, write, tmp_path, monkeypatch, file
):
    claim(folder, manifest)
    folder.journal.write_text("prompts of other data")
    corrected = load_manifest(write(tmp_path / "corrected", {"model.source.random.layers": 4}))
    replace = Path.replace

    def killed(path: Path, target: Path) -> Path:
        if target.name == file:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            claim(folder, corrected)
    assert not folder.journal.exists()


def test_a_folder_in_which_another_run_trained_meanwhile_is_not_claimed(folder, manifest):
    claim(folder, manifest)
    folder.check(manifest, resume=False)
    (folder.checkpoints / "update-000001").mkdir(parents=True)
    with pytest.raises(FolderRefused, match="trained meanwhile"):
        claim(folder, manifest)


def test_a_run_that_is_resumed_keeps_its_records(folder, manifest):
    claim(folder, manifest)
    folder.metrics.write_text(EVALUATED)
    claim(folder, manifest, resume=True)
    assert folder.metrics.read_text() == EVALUATED


@pytest.mark.parametrize("resume", [False, True])
def test_the_folder_of_a_run_that_has_not_ended_is_refused_until_it_has(folder, manifest, resume):
    with folder.held():
        claim(folder, manifest)
        with pytest.raises(
            FolderRefused, match="is the folder of a run that has not ended; wait for it, or name anoth"
        ):
            folder.check(manifest, resume=resume)
    folder.check(manifest, resume=resume)


def test_a_run_that_was_killed_holds_its_folder_no_longer(folder, manifest):
    """By the kernel: nobody is left to give the lock back."""
    claim(folder, manifest)
    hold = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, folder.lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(FolderRefused, match="has not ended"):
            folder.check(manifest, resume=False)
        other.kill()
    folder.check(manifest, resume=False)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"train.updates": 9, "train.optimizer": {"learningRate": 0.1}}, None),
        (
            {"model.source.random.layers": 4, "data.shuffle": False, "seed": 3},
            r"holds a run with another manifest \(.*run.yaml\):\n  spec.seed: 0 there, 3 here\n"
            r"  spec.model.source.random.layers: 2 there, 4 here\n  spec.data.shuffle: true there, false here\nRestore these values",
        ),
    ],
    ids=["longer and with another rate", "with another model and other data"],
)
def test_a_run_may_continue_with_changes_unless_its_weights_would_mean_something_else(
    folder, manifest, write, tmp_path, changes, refused
):
    claim(folder, manifest)
    TRAINED["an update"](folder)
    other = load_manifest(write(tmp_path / "other", changes))
    with nullcontext() if refused is None else pytest.raises(FolderRefused, match=refused):
        folder.check(other, resume=True)
    assert load_manifest(folder.manifest) == manifest


@pytest.mark.parametrize("content", ["", "[1, 2]", "spec: 3", "kind: Other", "a: [", "spec: {", "\x00"])
def test_a_damaged_owner_file_is_named(folder, manifest, content):
    folder.root.mkdir()
    folder.manifest.write_text(content)
    with pytest.raises(
        FolderRefused, match=r"run.yaml does not say whose folder this is .*; restore it, or name another"
    ):
        folder.check(manifest, resume=True)


@pytest.fixture
def read_only(tmp_path):
    """A folder that cannot be written, for root too."""
    place = tmp_path / "read-only"
    place.mkdir()
    if os.geteuid() != 0:
        place.chmod(0o500)
        yield place
        place.chmod(0o700)
        return
    if shutil.which("mount") is None:
        pytest.skip("root may write everywhere, and nothing can be mounted here")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"root may write everywhere, and nothing can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_place_that_cannot_be_written_is_refused_by_name(manifest, read_only):
    with pytest.raises(FolderRefused, match=rf"{read_only} cannot be written \(.+\); name another folder"):
        RunFolder(read_only / "a" / "b").check(manifest, resume=False)


def test_a_place_of_a_claim_that_cannot_be_written_is_refused_with_what_helps_in_a_cluster(manifest, read_only):
    """Nobody wrote --output there, and another folder of the same claim would be as read-only."""
    with pytest.raises(FolderRefused, match=r"let user \d+ and group \d+ of the pods write") as raised:
        RunFolder(read_only / "a").check(manifest, resume=True, in_cluster=True)
    assert "--output" not in str(raised.value)
    assert "another folder" not in str(raised.value)


def test_a_claim_that_fails_leaves_nothing(manifest, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FolderRefused, match="cannot be written: Not a directory"):
        Claim(tmp_path / "file" / "out", None, ()).take(OWNER)
    full = Path("/dev/full")
    if full.exists():
        folder = RunFolder(tmp_path / "out")
        epoch = take(folder.root, OWNER, None)
        (epoch.workspace / "run.yaml").symlink_to(full)
        with pytest.raises(FolderRefused, match="No space left on device"):
            folder.claim(manifest, epoch, "tiny-1")
        assert not folder.root.exists()


class Killed(BaseException):
    """Nothing of the process continues after this."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("file", ["owner.json", "run.yaml", "run.id"])
def test_a_claim_that_is_killed_leaves_a_folder_for_the_next_run(folder, manifest, monkeypatch, file, after):
    """Killed at each file that it renames into its place."""
    rename = Path.replace

    def then_killed(path: Path, target: Path) -> Path:
        if target.name == file and not after:
            raise Killed
        replaced = rename(path, target)
        if target.name == file:
            raise Killed
        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", then_killed)
        with pytest.raises(Killed):
            claim(folder, manifest)
    folder.check(manifest, resume=folder.manifest.exists())
    claim(folder, manifest)
    assert folder.identity.startswith("tiny-")
    assert sorted(path.name for path in folder.root.iterdir()) == ["owner.json", "run.id", "run.yaml"]
