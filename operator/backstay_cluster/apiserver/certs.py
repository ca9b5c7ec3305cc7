"""A certificate for a server on loopback, made at its start and never written down with its key for longer than a moment.

kubectl sends a bearer token over https only, so the server needs one, and Python's standard library cannot make any.
What is needed is small: one ECDSA key on P-256, one self-signed X.509 certificate (RFC 5280), so it is written out here
instead of taking on a dependency for it. The arithmetic is not constant-time; it signs once, for nobody to measure.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import secrets
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# NIST P-256 (FIPS 186-4, D.1.2.3)
_P: Final = 2**256 - 2**224 + 2**192 + 2**96 - 1
_A: Final = _P - 3
_N: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G: Final = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int] | None

_EC_KEY: Final = bytes.fromhex("06072a8648ce3d0201")  # id-ecPublicKey
_P256: Final = bytes.fromhex("06082a8648ce3d030107")  # prime256v1
_ECDSA_SHA256: Final = bytes.fromhex("300a06082a8648ce3d040302")


def _add(one: _Point, other: _Point) -> _Point:
    if one is None or other is None:
        return other if one is None else one
    if one[0] == other[0]:
        if (one[1] + other[1]) % _P == 0:
            return None
        slope = (3 * one[0] * one[0] + _A) * pow(2 * one[1], -1, _P) % _P
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, _P) % _P
    x = (slope * slope - one[0] - other[0]) % _P
    return x, (slope * (one[0] - x) - one[1]) % _P


def _times(factor: int, point: _Point) -> _Point:
    result: _Point = None
    while factor:
        if factor & 1:
            result = _add(result, point)
        point = _add(point, point)
        factor >>= 1
    return result


def _sign(key: int, message: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(message).digest())
    while True:
        nonce = secrets.randbelow(_N - 1) + 1
        point = _times(nonce, _G)
        r = 0 if point is None else point[0] % _N
        s = pow(nonce, -1, _N) * (digest + r * key) % _N
        if r and s:
            return _sequence(_integer(r), _integer(s))


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body)
    if size < 0x80:
        return bytes([tag, size]) + body
    length = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([tag, 0x80 | len(length)]) + length + body


def _sequence(*parts: bytes) -> bytes:
    return _der(0x30, *parts)


def _integer(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1))


def _time(when: datetime.datetime) -> bytes:
    if when.year < 2050:  # RFC 5280, 4.1.2.5
        return _der(0x17, when.strftime("%y%m%d%H%M%SZ").encode())
    return _der(0x18, when.strftime("%Y%m%d%H%M%SZ").encode())


def _extension(oid: str, value: bytes, *, critical: bool = False) -> bytes:
    flag = _der(0x01, b"\xff") if critical else b""
    return _sequence(bytes.fromhex(oid), flag, _der(0x04, value))


def _names(hosts: list[str]) -> bytes:
    found = []
    for host in hosts:
        try:
            found.append(_der(0x87, ipaddress.ip_address(host).packed))
        except ValueError:
            found.append(_der(0x82, host.encode("ascii")))
    return _sequence(*found)


def _pem(kind: str, der: bytes) -> str:
    text = base64.b64encode(der).decode()
    lines = "\n".join(text[at : at + 64] for at in range(0, len(text), 64))
    return f"-----BEGIN {kind}-----\n{lines}\n-----END {kind}-----\n"


@dataclass(frozen=True, repr=False)
class Certificate:
    """A certificate and its private key, both in PEM."""

    pem: str
    key: str

    def server_context(self) -> ssl.SSLContext:
        """For a server that shows this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # OpenSSL reads keys from files only; the file is this user's alone and gone after the next lines.
        handle, name = tempfile.mkstemp(suffix=".pem")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(self.key + self.pem)
            context.load_cert_chain(name)
        finally:
            Path(name).unlink()
        return context


def make_certificate(hosts: list[str], *, days: int = 365) -> Certificate:
    """A new self-signed certificate for names and addresses, valid from an hour ago for `days` days."""
    key = secrets.randbelow(_N - 1) + 1
    point = _times(key, _G)
    if point is None:  # pragma: no cover  # the order of G is N, and 0 < key < N
        raise ArithmeticError("the public key is the point at infinity")
    public = _der(0x03, b"\x00\x04" + point[0].to_bytes(32) + point[1].to_bytes(32))
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    common_name = _sequence(bytes.fromhex("0603550403"), _der(0x0C, b"backstay embedded cluster"))
    name = _sequence(_der(0x31, common_name))
    extensions = _sequence(
        _extension("0603551d13", _sequence(_der(0x01, b"\xff")), critical=True),  # basicConstraints: a CA, of itself
        _extension("0603551d0f", _der(0x03, b"\x02\x84"), critical=True),  # keyUsage: digitalSignature, keyCertSign
        _extension("0603551d25", _sequence(bytes.fromhex("06082b06010505070301"))),  # extKeyUsage: serverAuth
        _extension("0603551d0e", _der(0x04, hashlib.sha256(public).digest()[:20])),  # subjectKeyIdentifier
        _extension("0603551d11", _names(hosts)),  # subjectAltName
    )
    body = _sequence(
        _der(0xA0, _integer(2)),
        _integer(secrets.randbits(127) | 1),
        _ECDSA_SHA256,
        name,
        _sequence(_time(start), _time(start + datetime.timedelta(days=days))),
        name,
        _sequence(_sequence(_EC_KEY, _P256), public),
        _der(0xA3, extensions),
    )
    signed = _sequence(body, _ECDSA_SHA256, _der(0x03, b"\x00", _sign(key, body)))
    secret = _sequence(_integer(1), _der(0x04, key.to_bytes(32)), _der(0xA0, _P256), _der(0xA1, public))
    return Certificate(_pem("CERTIFICATE", signed), _pem("EC PRIVATE KEY", secret))
