"""The certificates that pods make for Ray's TLS: who accepts whom, for how long, and which authorities are refused."""

import ssl
import stat
from concurrent import futures
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from qwen35_trainer import pod_certificate
from qwen35_trainer.pod_certificate import Authority

NOW = datetime.now(UTC).replace(microsecond=0)
HEAD = "demo-1-abcde-head-svc.team.svc.cluster.local"
ARGUMENTS = ["--addresses", "10.1.2.3,fd00::7", "--name", HEAD]


def authority(
    name: str = "authority",
    *,
    key: object = None,
    issuer: Authority | None = None,
    ca: bool | None = True,
    signs: bool | None = True,
    start: timedelta = timedelta(days=-1),
    end: timedelta = timedelta(days=90),
) -> Authority:
    """A certificate authority. ca, signs: contents of the extensions BasicConstraints and KeyUsage; None for no extension."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + start)
        .not_valid_after(NOW + end)
    )
    if ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    if signs is not None:
        usages = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=signs, crl_sign=signs, decipher_only=False, **usages
        )
        builder = builder.add_extension(usage, critical=True)
    signer = issuer.key if issuer else key
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(identifier, critical=False).add_extension(above, critical=False)
    digest = None if isinstance(signer, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return Authority(builder.sign(signer, digest), key)


def store(folder: Path, made: Authority, *, password: bytes | None = None, more: tuple[Authority, ...] = ()) -> Path:
    """Write the authority as a Secret is mounted. more: further certificates of the file, as for an intermediate."""
    folder.mkdir(exist_ok=True)
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificates = [each.certificate.public_bytes(encoding) for each in (made, *more)]
    (folder / "tls.crt").write_bytes(b"".join(certificates))
    (folder / "tls.key").write_bytes(made.key.private_bytes(encoding, form, encryption))
    return folder


def pod(folder: Path, made: Authority, arguments: list[str] = ARGUMENTS, **secret: object) -> Path:
    """The files of a pod's TLS, made with the authority."""
    files = folder / "tls"
    files.mkdir(parents=True, exist_ok=True)
    assert pod_certificate.main(arguments, store(folder / "authority", made, **secret), files) == 0
    return files


def certificate(files: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((files / "tls.crt").read_bytes())


def shake_hands(server: Path, client: Path, address: str) -> None:
    """TLS between two pods as between processes of Ray: each checks the other. Raises ssl.SSLError if one refuses."""
    contexts = []
    for purpose, files in ((ssl.PROTOCOL_TLS_SERVER, server), (ssl.PROTOCOL_TLS_CLIENT, client)):
        context = ssl.SSLContext(purpose)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_cert_chain(files / "tls.crt", files / "tls.key")
        context.load_verify_locations(files / "ca.crt")
        contexts.append(context)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        contexts[0].wrap_bio(to_server, to_client, server_side=True),
        contexts[1].wrap_bio(to_client, to_server, server_hostname=address),
    ]
    for _ in range(8):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    for end in ends:
        end.do_handshake()
        assert end.version() == "TLSv1.3"


@pytest.mark.parametrize("address", ["10.1.2.3", "fd00::7", HEAD, "localhost", "127.0.0.1", "::1"])
def test_pods_accept_each_other_at_every_address_of_a_pod(tmp_path, address):
    made = authority()
    shake_hands(pod(tmp_path / "head", made), pod(tmp_path / "worker", made, ["--addresses", "10.1.2.4"]), address)


@pytest.mark.parametrize("address", ["10.1.2.4", "other-head-svc.team.svc.cluster.local"])
def test_a_pod_is_not_accepted_at_the_address_of_another(tmp_path, address):
    files = pod(tmp_path, authority())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(files, files, address)


def test_a_pod_of_another_authority_is_refused_by_both_ends(tmp_path):
    ours, theirs = pod(tmp_path / "ours", authority()), pod(tmp_path / "theirs", authority())
    for server, client in ((ours, theirs), (theirs, ours)):
        with pytest.raises(ssl.SSLError):
            shake_hands(server, client, "10.1.2.3")


@pytest.mark.parametrize("size", [2048, 256], ids=["RSA", "P-256"])
def test_the_certificate_is_of_the_authority_for_server_and_client_and_signs_nothing(tmp_path, size):
    key = rsa.generate_private_key(65537, size) if size == 2048 else ec.generate_private_key(ec.SECP256R1())
    made = authority(key=key)
    leaf = certificate(pod(tmp_path, made))
    leaf.verify_directly_issued_by(made.certificate)
    extension = leaf.extensions.get_extension_for_class
    assert not extension(x509.BasicConstraints).value.ca
    usage = extension(x509.KeyUsage).value
    assert (usage.digital_signature, usage.key_cert_sign, usage.crl_sign) == (True, False, False)
    assert set(extension(x509.ExtendedKeyUsage).value) == {
        ExtendedKeyUsageOID.SERVER_AUTH,
        ExtendedKeyUsageOID.CLIENT_AUTH,
    }
    assert extension(x509.AuthorityKeyIdentifier).value.key_identifier


def test_the_certificate_lives_as_long_as_its_authority_and_begins_before_clocks_that_are_behind():
    def dates(made: Authority) -> tuple[timedelta, timedelta]:
        made_now = pod_certificate.pod_certificate(made, ["10.1.2.3"], [], NOW)
        leaf = x509.load_pem_x509_certificate(made_now.certificate)
        assert made_now.end == leaf.not_valid_after_utc
        return leaf.not_valid_before_utc - NOW, leaf.not_valid_after_utc - NOW

    assert dates(authority(end=timedelta(days=20))) == (timedelta(hours=-1), timedelta(days=20))
    assert dates(authority(start=timedelta(minutes=-5))) == (timedelta(minutes=-5), timedelta(days=90))


def test_only_the_pods_user_reads_the_key_and_a_second_start_replaces_all_files(tmp_path):
    made = authority()
    files = pod(tmp_path, made)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in files.iterdir()}
    assert modes == {"tls.key": 0o400, "tls.crt": 0o444, "ca.crt": 0o444}
    before = {file.name: file.read_bytes() for file in files.iterdir()}
    (files / ".tls.key.partial").write_bytes(b"of a start that was killed")
    pod(tmp_path, made)
    after = {file.name: file.read_bytes() for file in files.iterdir()}
    assert [name for name in after if after[name] == before.get(name)] == ["ca.crt"]
    assert after.keys() == before.keys()
    shake_hands(files, files, "10.1.2.3")


def test_the_authoritys_key_is_in_no_file_of_the_pod(tmp_path):
    made = authority()
    files = pod(tmp_path, made)
    secret = (tmp_path / "authority/tls.key").read_bytes().splitlines()[1]
    assert not any(secret in file.read_bytes() for file in files.iterdir())


def test_a_renewed_authority_with_the_same_key_is_trusted_by_running_pods_and_one_with_another_key_is_not(tmp_path):
    made = authority()
    running = pod(tmp_path / "running", made)
    renewed = pod(tmp_path / "renewed", authority(key=made.key, end=timedelta(days=180)))
    shake_hands(running, renewed, "10.1.2.3")
    shake_hands(renewed, running, "10.1.2.3")
    rotated = pod(tmp_path / "rotated", authority())
    with pytest.raises(ssl.SSLError):
        shake_hands(running, rotated, "10.1.2.3")


def test_an_intermediate_authority_needs_no_root(tmp_path):
    root = authority("root")
    middle = authority("middle", issuer=root)
    files = pod(tmp_path / "pod", middle, more=(root,))
    shake_hands(files, files, "10.1.2.3")
    # What the root signs elsewhere is not trusted.
    other = pod(tmp_path / "other", authority("elsewhere", issuer=root))
    with pytest.raises(ssl.SSLError):
        shake_hands(files, other, "10.1.2.3")


@pytest.mark.parametrize("intermediate", [False, True])
def test_grpc_takes_the_files_as_ray_loads_them(tmp_path, monkeypatch, intermediate):
    """With the credentials of ray/_common/tls_utils.py and ray/_private/grpc_utils.py, without the rest of Ray."""
    import grpc

    made = authority("middle", issuer=authority("root")) if intermediate else authority()
    files = pod(tmp_path / "pod", made)
    foreign = pod(tmp_path / "foreign", authority())

    def load(folder: Path) -> tuple[bytes, bytes, bytes]:
        return tuple((folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt"))

    chain, key, trusted = load(files)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: request[::-1])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Turn": method}),))
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)], trusted, require_client_auth=True)
    )
    server.start()

    def call(folder: Path) -> bytes:
        chain, key, trusted = load(folder)
        credentials = grpc.ssl_channel_credentials(trusted, key, chain)
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            return channel.unary_unary("/test/Turn")(b"abc")

    try:
        assert call(files) == b"cba"
        with pytest.raises(grpc.RpcError):
            call(foreign)
        with pytest.raises(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.unary_unary("/test/Turn")(b"abc")
    finally:
        server.stop(None)


WRONG = {
    "a server's certificate": (authority(ca=False), {}, "is not a certificate authority"),
    "no constraints": (authority(ca=None), {}, "is not a certificate authority"),
    "may not sign": (authority(signs=False), {}, "is not a certificate authority"),
    "expired": (authority(end=timedelta(seconds=-1)), {}, "has expired"),
    "of the future": (authority(start=timedelta(days=2)), {}, "is valid only from"),
    "another key": (
        Authority(authority().certificate, ec.generate_private_key(ec.SECP256R1())),
        {},
        "is not the key of tls.crt",
    ),
    "a key that gRPC does not take": (authority(key=ed25519.Ed25519PrivateKey.generate()), {}, "RSA or ECDSA"),
    "a passphrase": (authority(), {"password": b"secret"}, "without a passphrase"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_authority_that_ray_could_not_use_is_refused_with_the_reason(case, tmp_path, capsys):
    made, secret, expected = WRONG[case]
    source = store(tmp_path / "authority", made, **secret)
    assert pod_certificate.main(ARGUMENTS, source, tmp_path) == 1
    text = capsys.readouterr().err
    assert "spec.pods.tls.secretName" in text
    assert expected in text
    assert not (tmp_path / "tls.key").exists()


def test_an_authority_without_the_extension_about_its_key_may_sign(tmp_path):
    pod(tmp_path, authority(signs=None))


@pytest.mark.parametrize("file", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"text"])
def test_a_file_without_content_is_named(file, content, tmp_path, capsys):
    source = store(tmp_path / "authority", authority())
    (source / file).unlink() if content is None else (source / file).write_bytes(content)
    assert pod_certificate.main(ARGUMENTS, source, tmp_path) == 1
    assert file in capsys.readouterr().err


def test_all_problems_are_reported_together(tmp_path, capsys):
    made = authority(ca=False, end=timedelta(seconds=-1))
    arguments = ["--addresses", "10.1.2", "--name", "$(FQ_RAY_IP)"]
    assert pod_certificate.main(arguments, store(tmp_path / "authority", made), tmp_path) == 1
    text = capsys.readouterr().err
    for expected in ("10.1.2", "$(FQ_RAY_IP)", "is not a certificate authority", "has expired"):
        assert expected in text
    assert pod_certificate.main(["--addresses", ""], store(tmp_path / "authority", authority()), tmp_path) == 1
    assert "no IP address" in capsys.readouterr().err
