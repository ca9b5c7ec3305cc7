"""Credentials with and without TLS, for tests and for the programs that they start."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from backstay_cluster.tests.files import put
from backstay_rpc.credentials import Credentials

HOSTS = ("127.0.0.1", "::1")


def write_certificate(folder: Path) -> None:
    """A certificate of this machine's loopback addresses, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of a test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host)) for host in HOSTS]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    put(
        folder / "key.pem",
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    put(folder / "certificate.pem", certificate.public_bytes(serialization.Encoding.PEM))


def credentials_of(token: str, folder: str) -> Credentials:
    """Credentials with this token, and with TLS by the certificate in `folder`, or without TLS if that is empty."""
    if not folder:
        return Credentials(token)
    accepts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    accepts.load_cert_chain(Path(folder) / "certificate.pem", Path(folder) / "key.pem")
    return Credentials(token, accepts, ssl.create_default_context(cafile=str(Path(folder) / "certificate.pem")))
