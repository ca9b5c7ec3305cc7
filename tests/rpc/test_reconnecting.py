"""A channel to a server that cannot be reached costs little: the operator has thousands of them (O8)."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from backstay_rpc.channels import open_aio_channel


def test_the_pause_between_attempts_can_be_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def note(_: str, options: list[tuple[str, Any]]) -> None:
        assert len(dict(options)) == len(options)
        asked.append(dict(options))

    monkeypatch.setattr(grpc.aio, "insecure_channel", note)
    open_aio_channel("127.0.0.1:1")
    open_aio_channel("127.0.0.1:1", reconnect_within=2.0)
    usual, patient = asked
    assert patient == {**usual, "grpc.max_reconnect_backoff_ms": 2000}
    assert usual["grpc.max_reconnect_backoff_ms"] < 2000
