"""A real Ray with the certificates that pods make: it works, takes no connection without a certificate, and a run trains on it."""

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from qwen35_operator.desired.ray_tls import VARIABLES
from qwen35_trainer.contract.shared_names import TLS_FOLDER
from qwen35_trainer.pod_certificate import Authority, pod_certificate, write
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import UpdateRecord
from tests.forks.start import start
from tests.patience import PATIENCE

from .conftest import ENVIRONMENT

SCRIPT = """
import sys
import ray

ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=1, object_store_memory=100_000_000)

@ray.remote
def turned(data):
    return data[::-1]

assert ray.get(turned.remote(b"abc")) == b"cba"
assert ray.get(turned.remote(ray.put(bytes(10_000_000) + b"end")))[:3] == b"dne"
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


def files(folder: Path) -> Path:
    """Certificates of a new authority for all addresses of this machine, as an init container of a pod makes them."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    authority = Authority(certificate, key)
    links = [link for group in psutil.net_if_addrs().values() for link in group if link.family == socket.AF_INET]
    folder.mkdir()
    write(folder, pod_certificate(authority, [link.address for link in links], [], now), authority)
    return folder


def variables(folder: Path) -> dict[str, str]:
    """The environment of a pod with these certificates."""
    return {name: value.replace(TLS_FOLDER, str(folder)) for name, value in VARIABLES.items()}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str, int]]:
    """A Ray with TLS: folder of its certificates, address and port of its control store."""
    folder = files(tmp_path_factory.mktemp("ray-tls") / "tls")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | variables(folder) | {"RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        host, port = process.stdout.readline().strip().rsplit(":", 1)
        yield folder, host, int(port)
    finally:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def connected(host: str, port: int, context: ssl.SSLContext) -> bytes:
    """The first bytes that Ray sends over TLS: HTTP/2 settings, if it takes the connection."""
    with (
        socket.create_connection((host, port), timeout=PATIENCE) as plain,
        context.wrap_socket(plain, server_hostname=host) as end,
    ):
        end.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        return end.recv(9)


def context(trusted: Path, own: Path | None) -> ssl.SSLContext:
    result = ssl.create_default_context(cafile=trusted / "ca.crt")
    result.set_alpn_protocols(["h2"])
    if own is not None:
        result.load_cert_chain(own / "tls.crt", own / "tls.key")
    return result


def test_ray_runs_tasks_and_takes_peers_with_a_certificate(secured):
    folder, host, port = secured
    assert connected(host, port, context(folder, folder))[3] == 4  # a frame of settings


def test_ray_takes_no_peer_without_a_certificate_or_of_another_authority(secured, tmp_path):
    folder, host, port = secured
    for own in (None, files(tmp_path / "foreign")):
        try:
            answer = connected(host, port, context(folder, own))
        except (ssl.SSLError, ConnectionError):
            answer = b""
        assert answer == b""


def test_ray_does_not_speak_without_encryption(secured):
    _, host, port = secured
    with socket.create_connection((host, port), timeout=PATIENCE) as plain:
        plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        try:
            answer = plain.recv(9)
        except ConnectionError:
            answer = b""
    assert answer[3:4] != b"\x04"


def test_a_run_trains_with_tls(write, tmp_path):
    """All processes of Ray and the connections to the replicas use it."""
    file, output, errors = write(tmp_path), tmp_path / "out", tmp_path / "errors"
    with errors.open("wb") as err:
        process = start(
            ["-m", "qwen35_trainer.cli", "run", str(file), "--output", str(output)],
            env=os.environ | ENVIRONMENT | variables(files(tmp_path / "tls")),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
    try:
        assert process.wait(PATIENCE) == 0, errors.read_text()
    finally:
        process.kill()
        process.wait()
    updates = [record for record in read_records(output / "metrics.jsonl") if isinstance(record, UpdateRecord)]
    assert [record.update for record in updates] == [1, 2, 3]
    logs = "".join(log.read_text() for log in output.rglob("*.log"))
    assert "calls travel through Ray" not in logs
