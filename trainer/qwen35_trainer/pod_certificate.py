"""Makes the certificate of a pod for Ray's TLS, before Ray starts: `python -m qwen35_trainer.pod_certificate`.

    AUTHORITY_FOLDER: tls.crt, tls.key ──► key of this pod, certificate for its addresses ──► TLS_FOLDER: tls.crt, tls.key, ca.crt

Only the init container that runs this module has the authority's key. The pods' operator describes that container
(`qwen35_operator/desired/ray_tls.py`). Each process of Ray is both server and client, so the certificate is for both.

The certificate is valid as long as that of the authority, because Ray reads its files when a process starts, and a
training may run for weeks: nothing renews the certificate of a pod. It is trusted by all pods whose authority has the
same subject and key, also if the authority's certificate was renewed in between.
"""

import argparse
import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from qwen35_trainer.contract.shared_names import (
    AUTHORITY_FILE,
    AUTHORITY_FOLDER,
    CERTIFICATE_FILE,
    KEY_FILE,
    TLS_FOLDER,
)

OWN_NAMES = ("localhost",)
OWN_ADDRESSES = ("127.0.0.1", "::1")
"""Names and addresses by which the processes of one pod reach each other."""
CLOCK_SKEW = timedelta(hours=1)
"""Time by which the clocks of two nodes may differ: the certificate is valid before it is made."""
KEY_MODE = 0o400
CERTIFICATE_MODE = 0o444
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


@dataclass(frozen=True)
class Authority:
    """A certificate authority: its certificate, and the private key with which it signs."""

    certificate: x509.Certificate
    key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class PodCertificate:
    """The certificate of a pod and its private key, in PEM."""

    certificate: bytes
    key: bytes
    end: datetime
    """When the certificate expires."""


def read_authority(folder: Path) -> Authority:
    """Read an authority from the files tls.crt and tls.key of a folder.

    Of several certificates in tls.crt, the first one is the authority's, as in a Secret of cert-manager. Raises
    ValueError with a message if a file has no usable content, and OSError if it cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificates((folder / CERTIFICATE_FILE).read_bytes())[0]
    except ValueError as error:
        raise ValueError(f"{CERTIFICATE_FILE} has no certificate in PEM: {error}") from error
    try:
        key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), password=None)
    except TypeError as error:
        raise ValueError(f"{KEY_FILE} is encrypted. Store the key without a passphrase.") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{KEY_FILE} has no private key in PEM: {error}") from error
    if isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
        return Authority(certificate, key)
    raise ValueError(f"{KEY_FILE} has a key of type {type(key).__name__}. Ray needs RSA or ECDSA.")


def problems(authority: Authority, now: datetime) -> Iterator[str]:
    """Yield a message for each reason why Ray would not accept certificates of this authority."""
    certificate = authority.certificate
    if certificate.public_key() != authority.key.public_key():
        yield f"{KEY_FILE} is not the key of {CERTIFICATE_FILE}. Store the pair of one authority."
    if not _may_sign(certificate):
        name = certificate.subject.rfc4514_string()
        yield f"{CERTIFICATE_FILE} ({name}) is not a certificate authority. With cert-manager, set isCA: true."
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < start:
        yield f"{CERTIFICATE_FILE} is valid only from {start:%Y-%m-%d %H:%M} UTC. Check the clock of the node."
    if now >= end:
        yield f"{CERTIFICATE_FILE} has expired on {end:%Y-%m-%d %H:%M} UTC. Renew the authority's certificate."


def pod_certificate(
    authority: Authority, addresses: Sequence[str], names: Sequence[str], now: datetime
) -> PodCertificate:
    """Return a new key, and a certificate of the authority for it, by which other pods accept this pod.

    addresses: IP addresses of the pod. names: DNS names of the pod, besides localhost.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ray-pod")])
    own_names = [x509.DNSName(name) for name in dict.fromkeys((*OWN_NAMES, *names))]
    own_addresses = [x509.IPAddress(ipaddress.ip_address(each)) for each in dict.fromkeys((*OWN_ADDRESSES, *addresses))]
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(max(now - CLOCK_SKEW, issuer.not_valid_before_utc))
        .not_valid_after(issuer.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_only_signatures(), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(x509.SubjectAlternativeName([*own_names, *own_addresses]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_authority_key_identifier(issuer), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return PodCertificate(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.not_valid_after_utc,
    )


def write(folder: Path, made: PodCertificate, authority: Authority) -> None:
    """Write the files that Ray reads into a folder. Files of an earlier start of the pod are replaced."""
    trusted = authority.certificate.public_bytes(serialization.Encoding.PEM)
    for name, content, mode in (
        (KEY_FILE, made.key, KEY_MODE),
        (CERTIFICATE_FILE, made.certificate, CERTIFICATE_MODE),
        (AUTHORITY_FILE, trusted, CERTIFICATE_MODE),
    ):
        partial = folder / f".{name}.partial"
        partial.unlink(missing_ok=True)
        # The file has its mode from the start: the key is never readable by others.
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        partial.replace(folder / name)


def main(arguments: Sequence[str], source: Path = Path(AUTHORITY_FOLDER), target: Path = Path(TLS_FOLDER)) -> int:
    """Make the certificate of this pod, and return the exit code.

    source: folder with the authority. target: folder of the new files.
    """
    parser = argparse.ArgumentParser(
        prog="python -m qwen35_trainer.pod_certificate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--addresses", required=True, help="IP addresses of the pod, separated by commas.")
    parser.add_argument("--name", action="append", default=[], help="DNS name of the pod. May be repeated.")
    options = parser.parse_args(arguments)
    addresses, now = [each for each in options.addresses.split(",") if each], datetime.now(UTC)
    refusals = list(_wrong_options(addresses, options.name))
    try:
        authority = read_authority(source)
    except (OSError, ValueError) as error:
        refusals.append(str(error))
    else:
        refusals += problems(authority, now)
    if refusals:
        lines = ["spec.pods.tls.secretName: the Secret cannot be used for Ray's TLS.", *refusals]
        sys.stderr.write("\n".join(lines) + "\n")
        return 1
    made = pod_certificate(authority, addresses, options.name, now)
    write(target, made, authority)
    owners = ", ".join([*addresses, *options.name])
    sys.stdout.write(f"certificate for {owners}, valid until {made.end:%Y-%m-%d %H:%M} UTC\n")
    return 0


def _wrong_options(addresses: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    if not addresses:
        yield "--addresses is empty: the pod has no IP address yet."
    for address in addresses:
        try:
            ipaddress.ip_address(address)
        except ValueError as error:
            yield f"--addresses: {error}."
    for name in names:
        if not NAME.fullmatch(name):
            yield f"--name {name} is not a DNS name. KubeRay sets FQ_RAY_IP and RAY_IP in the pod."


def _may_sign(certificate: x509.Certificate) -> bool:
    try:
        if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            return False
        return certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    except x509.ExtensionNotFound as error:
        return error.oid == x509.KeyUsage.oid  # an authority without this extension may sign


def _authority_key_identifier(issuer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())  # type: ignore[arg-type]
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)


def _only_signatures() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
