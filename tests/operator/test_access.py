"""A service account and a plain kubeconfig name the API server and the user without the kubernetes package."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from backstay_operator import access

PEM = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"


def kubeconfig(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> str:
    path = folder / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "other", "cluster": {"server": "x"}}, {"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "here",
            }
        )
    )
    return str(path)


def token_of(found: access.ApiCredentials) -> str | None:
    async def ask() -> str | None:
        return await found.token()

    return asyncio.run(ask())


def test_a_kubeconfig_with_a_token_is_read_here(tmp_path: Path) -> None:
    data = base64.b64encode(PEM.encode()).decode()
    path = kubeconfig(tmp_path, {"server": "https://h:6443/", "certificate-authority-data": data}, {"token": "t"})
    found = access._plain(path)
    assert found is not None
    assert (found.host, found.ca_data, found.ca_path, token_of(found)) == ("https://h:6443", PEM, None, "t")
    path = kubeconfig(tmp_path, {"server": "https://h", "certificate-authority": "ca.crt"}, {"token": "t"})
    found = access._plain(path)
    assert found is not None
    assert found.ca_path == str(tmp_path / "ca.crt"), "relative to the kubeconfig"


@pytest.mark.parametrize(
    ("cluster", "user"),
    [
        ({"server": "https://h", "insecure-skip-tls-verify": True}, {"token": "t"}),
        ({"server": "https://h", "proxy-url": "http://p"}, {"token": "t"}),
        ({"server": "https://h"}, {"client-certificate": "c", "client-key": "k"}),
        ({"server": "https://h"}, {"exec": {"command": "x"}}),
        ({"server": "https://h"}, {"token": ""}),
        ({"server": "https://h", "certificate-authority-data": "!"}, {"token": "t"}),
        ({}, {"token": "t"}),
    ],
)
def test_what_is_not_plain_is_left_to_the_package(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    assert access._plain(kubeconfig(tmp_path, cluster, user)) is None


def test_the_package_reads_the_rest(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path, {"server": "https://h", "insecure-skip-tls-verify": True}, {"token": "t"})

    async def read() -> tuple[access.ApiCredentials, str | None]:
        found = await access.load(path)
        return found, await found.token()

    found, token = asyncio.run(read())
    assert (found.host, found.verify, token) == ("https://h", False, "t")
    (tmp_path / "kubeconfig").write_text("nothing: of use")
    with pytest.raises(access.AccessError, match="kubeconfig cannot be used"):
        asyncio.run(read())


def test_the_token_of_a_service_account_is_read_again(tmp_path: Path) -> None:
    """The kubelet replaces it before it runs out."""
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    for missing in ("ca.crt", "token"):
        with pytest.raises(access.AccessError, match=rf"{missing}.*--kubeconfig"):
            access._service_account(environ, tmp_path)
        (tmp_path / missing).write_text("one\n")
    found = access._service_account(environ, tmp_path)
    assert (found.host, found.ca_path, token_of(found)) == ("https://[fd00::1]:443", str(tmp_path / "ca.crt"), "one")
    now = 0.0
    token = access._ApiTokenFile(tmp_path / "token", lambda: now)
    token.read()
    (tmp_path / "token").write_text("two")
    assert asyncio.run(token()) == "one"
    now = 61.0
    assert asyncio.run(token()) == "two"
    (tmp_path / "token").write_text("")
    now = 200.0
    with pytest.raises(access.AccessError, match="is empty"):
        asyncio.run(token())
