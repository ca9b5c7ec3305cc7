"""Texts that name no folder for checkpoints are refused, and no other text is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_spec.places import refusal

SCHEMES = st.sampled_from(["s3", "gs", "file", "abfs", "hdfs"])
REST = st.from_regex(r"[a-z0-9]{1,9}(/[a-z0-9:]{1,9}){0,3}", fullmatch=True)


@given(SCHEMES, st.sampled_from(["", "/"]), REST)
def test_a_scheme_needs_two_slashes(scheme: str, slash: str, rest: str) -> None:
    why = refusal(f"{scheme}:{slash}{rest}")
    assert why is not None
    root = "/" if scheme == "file" else ""
    assert f"must be {scheme}://{root}{rest} for the scheme {scheme}" in why
    assert refusal(f"{scheme.upper()}:{slash}{rest}") is not None
    assert refusal(f"./{scheme}:{slash}{rest}") is None


@given(st.sampled_from(["", "/", "./", "../", "~/", "s3://", "memory://", "file:///", "simplecache::s3://"]), REST)
def test_paths_and_uris_that_can_be_written_are_not_refused(first: str, rest: str) -> None:
    assert refusal(first + rest) is None


@pytest.mark.parametrize("uri", ["http://a/b", "https://a", "simplecache::https://a", "zip://a::file:///b.zip"])
def test_what_can_only_be_read_is_refused(uri: str) -> None:
    why = refusal(uri)
    assert why is not None
    assert "can only be read" in why
