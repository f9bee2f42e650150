"""The release: everything is pinned or refused, and nothing has a tag before it was scanned, signed and verified."""

import re
import shutil
from datetime import date, timedelta
from pathlib import Path

import pytest
import yaml

from images import bases, release
from images.definition import definition, names
from images.dockerfile import BUILD_LOCK, render
from images.repository import REPOSITORY
from qwen35_operator.operator_settings import IMAGES

DIGEST = "sha256:" + "a" * 64
KEYLESS = release.Signer(identity="https://ci.example.com/release", issuer="https://token.example.com")
KEY = release.Signer(key="awskms:///alias/release", public_key="cosign.pub")
ARGUMENTS = ["TRITON_ASCEND_INDEX=https://packages.example.com", f"TRITON_ASCEND_HASHES={DIGEST}"]
LOCKS = sorted(path.name for path in (REPOSITORY / "requirements").glob("*.txt"))


def bases_with(monkeypatch: pytest.MonkeyPatch, folder: Path, digest: str) -> Path:
    """A table in which every base has the digest; the module reads it instead of the repository's."""
    file = folder / "bases.yaml"
    file.write_text("# A comment.\n" + "".join(f'{base}: "{digest}"\n' for base in bases.digests()))
    monkeypatch.setattr(bases, "FILE", file)
    return file


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_is_pinned_with_a_hash_and_no_lock_names_a_host(lock: str):
    text = (REPOSITORY / "requirements" / lock).read_text()
    assert release.unhashed(text) == []
    assert "://" not in text
    assert "--index-url" not in text


def test_a_requirement_without_a_version_or_a_hash_is_found():
    text = f"a==1 \\\n    --hash={DIGEST}\nb>=1 \\\n    --hash={DIGEST}\nc==2\n# d\n"
    assert release.unhashed(text) == ["b>=1", "c==2"]


def test_the_locks_of_a_release_are_those_that_build_files_install():
    installed = {BUILD_LOCK}
    for image in map(definition, names()):
        installed |= {*image.locks.values(), *([image.built] if image.built else [])}
    assert set(release.lock_files()) == installed


@pytest.mark.parametrize("image", names())
def test_every_installation_compares_hashes_or_is_this_repository(image: str):
    text = render(definition(image)).replace("\\\n", " ")
    installations = [line for line in text.splitlines() if "pip install" in line]
    assert len(installations) >= 3
    for line in installations:
        assert "--require-hashes" in line or line.endswith(" /tmp/source"), line
        # Nothing is fetched to build with: the builders come from their lock.
        assert "--no-build-isolation" in line or "--target" in line or "vendor.txt" in line, line


@pytest.mark.parametrize("image", names())
def test_build_files_name_known_bases_by_digest(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = definition(image).base
    assert base in bases.digests()
    bases_with(monkeypatch, tmp_path, DIGEST)
    text = render(definition(image))
    assert f"{base}@{DIGEST}" in text
    assert not re.search(rf"{re.escape(base)}(?!@)", text)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) <= {f"{base}@{DIGEST}", "${BASE}"}


def test_no_base_has_a_floating_tag():
    for base in bases.digests():
        assert re.search(r":[^:@]*\d", base), base
        assert not base.endswith(":latest")


def test_a_digest_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bases_with(monkeypatch, tmp_path, "sha256:abc")
    with pytest.raises(ValueError, match="sha256:abc is not a digest"):
        bases.digests()


def test_digests_are_written_into_the_table_and_its_comment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = bases_with(monkeypatch, tmp_path, "")
    bases.write(dict.fromkeys(bases.digests(), DIGEST))
    assert set(bases.digests().values()) == {DIGEST}
    assert file.read_text().startswith("# A comment.\n")
    with pytest.raises(ValueError, match="which is not a digest"):
        bases.write({next(iter(bases.digests())): "<html>"})


def test_a_release_with_an_unknown_base_or_argument_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    bases_with(monkeypatch, tmp_path, "")
    refused = release.problems()
    assert sum("is not known" in problem for problem in refused) == len(bases.digests())
    assert any("TRITON_ASCEND_HASHES has no value" in problem for problem in refused)
    with pytest.raises(SystemExit, match="Not everything is pinned"):
        release.main(key="k", public_key="p")
    bases_with(monkeypatch, tmp_path, DIGEST)
    assert release.problems(ARGUMENTS) == []


def test_a_release_without_a_signer_is_refused():
    with pytest.raises(SystemExit, match="Nobody signs"):
        release.main(identity="https://ci.example.com/release")


@pytest.mark.parametrize("image", names())
def test_an_image_is_built_for_all_its_architectures_with_sbom_and_provenance_and_without_a_tag(image: str):
    command = release.build_command(definition(image), "c0ffee", Path("m.json"), ARGUMENTS)
    assert {"--sbom=true", "--provenance=mode=max", f"images/{image}/Dockerfile"} <= set(command)
    assert (REPOSITORY / "images" / image / "Dockerfile").exists()
    platforms = command[command.index("--platform") + 1].split(",")
    assert platforms == [f"linux/{architecture}" for architecture in definition(image).architectures]
    assert "--tag" not in command
    assert "push-by-digest=true" in command[-1]
    assert "org.opencontainers.image.revision=c0ffee" in command
    assert ("--build-arg" in command) == bool(definition(image).build_arguments)


@pytest.mark.parametrize("signer", [KEYLESS, KEY], ids=["keyless", "key"])
@pytest.mark.parametrize("image", names())
def test_an_image_is_scanned_signed_and_verified_by_its_digest_before_it_has_a_tag(image: str, signer: release.Signer):
    commands = list(release.checked_commands(definition(image), DIGEST, signer))
    scans = len(definition(image).architectures)
    assert [command[:2] for command in commands] == [
        *[["trivy", "image"]] * scans,
        ["cosign", "sign"],
        ["cosign", "verify"],
        ["docker", "buildx"],
    ]
    assert all(command[-1] == f"{definition(image).name}@{DIGEST}" for command in commands)
    for scan in commands[:scans]:
        assert scan[scan.index("--severity") + 1] == "HIGH,CRITICAL"
        assert scan[scan.index("--exit-code") + 1] == "1"
    verify = " ".join(commands[-2])
    assert ("--key cosign.pub" in verify) == bool(signer.key)
    assert ("--certificate-identity https://ci.example.com/release" in verify) == (not signer.key)


def test_the_values_name_every_image_by_its_digest():
    values = release.values(dict.fromkeys(names(), DIGEST))
    assert values["image"] == {"digest": DIGEST}
    trainers = values["trainerImages"]
    assert isinstance(trainers, dict)
    assert trainers.keys() == IMAGES.keys()
    assert all(image == f"{IMAGES[profile].rpartition(':')[0]}@{DIGEST}" for profile, image in trainers.items())


def test_the_packaged_chart_installs_every_image_by_its_digest(tmp_path: Path):
    """So its signature covers the images, without a file of values next to it."""
    digests = {name: f"sha256:{number:064x}" for number, name in enumerate(names())}
    release.copy_chart(tmp_path, digests)
    package, _ = release.chart_commands(tmp_path, "registry.example.com/charts")
    assert Path(package[2]) == tmp_path / "qwen35-operator"
    stored = yaml.safe_load((tmp_path / "qwen35-operator" / "values.yaml").read_text())
    before = yaml.safe_load((REPOSITORY / release.CHART / "values.yaml").read_text())
    assert stored["image"] == before["image"] | {"digest": digests["operator"]}
    assert stored == before | {"image": stored["image"], "trainerImages": release.values(digests)["trainerImages"]}
    assert "# Every value and its default." in (tmp_path / "qwen35-operator" / "values.yaml").read_text()


def test_a_chart_without_a_place_for_a_digest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chart = tmp_path / release.CHART
    shutil.copytree(REPOSITORY / release.CHART, chart)
    (chart / "values.yaml").write_text((chart / "values.yaml").read_text().replace('  CPU: ""', "  CPU: mine"))
    monkeypatch.setattr(release, "REPOSITORY", tmp_path)
    with pytest.raises(ValueError, match="no empty entry of trainerImages"):
        release.copy_chart(tmp_path / "copy", dict.fromkeys(names(), DIGEST))


def test_a_plan_has_every_image_and_says_what_is_not_pinned(capsys: pytest.CaptureFixture[str]):
    release.main(registry="registry.example.com/charts", plan=True)
    printed = capsys.readouterr().out
    for name in names():
        assert f"--file images/{name}/Dockerfile" in printed
        assert f"--tag {definition(name).tagged} " in printed
    assert "helm push" in printed
    assert printed.count("# not pinned: ") == len(release.problems())


def test_the_chart_is_signed_by_the_digest_that_helm_prints(capsys: pytest.CaptureFixture[str]):
    assert release.pushed_digest(f"Pushed: registry.example.com/charts/a:1\nDigest: {DIGEST}\n") == DIGEST
    with pytest.raises(ValueError, match="named no digest"):
        release.pushed_digest("Pushed")
    release.main(registry="registry.example.com/charts", plan=True)
    assert (
        f"cosign sign --yes --recursive registry.example.com/charts/qwen35-operator@{release.PLACEHOLDER}"
        in capsys.readouterr().out
    )


def test_accepted_findings_have_a_reason_and_end():
    accepted = yaml.safe_load((REPOSITORY / release.ACCEPTED).read_text())["vulnerabilities"]
    for entry in accepted:
        assert entry["statement"], entry
        assert entry["expired_at"] <= date.today() + timedelta(days=90), entry
