"""The pure rules about strings in a pod."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.kubelet.expand import PathMap, expand, valid_image
from backstay_cluster.quantity import value as quantity

NAMES = st.from_regex(r"[A-Z_][A-Z0-9_]{0,5}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$(A)-$(B)", "1-$(B)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A $( $() $", "$A $( $() $"),
        ("100% $(A)$(A)", "100% 11"),
    ],
)
def test_references_expand_as_kubernetes_documents(text, expected):
    assert expand(text, {"A": "1"}) == expected


@given(st.dictionaries(NAMES, st.text(max_size=8)), st.text(alphabet="$()AB_ x", max_size=20))
def test_expansion_is_not_repeated_and_escaping_is_its_inverse(variables, text):
    """A value that looks like a reference stays as it is; `$` doubled always comes back as it was."""
    assert expand(text.replace("$", "$$"), variables) == text
    assert expand("$(X)", {**variables, "X": "$(X)$$"}) == "$(X)$$"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        ("1Gi", str(2**30)),
        ("2e3", "2000"),
        ("1E", str(10**18)),
        ("0", "0"),
        (4, "4"),
        ("1.5Ki", "1536"),
    ],
)
def test_quantities(text, value):
    assert quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "x", "1Zi", "1 Gi", "--1", "1.2.3"])
def test_an_invalid_quantity_is_refused_with_what_would_be_valid(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + ".*must be a number"):
        quantity(text)


@pytest.mark.parametrize(
    "name", ["busybox", "a/b:1.2", "reg.example.org:5000/x/y@sha256:" + "0" * 64, "localhost/x", "a__b", "x:Tag_1"]
)
def test_image_names(name):
    assert valid_image(name)


@pytest.mark.parametrize("name", ["", "UPPER", "a b", "a::b", "a:", "x@sha256:12", "-a", "a/", "http://x/y", "a" * 600])
def test_malformed_image_names(name):
    assert not valid_image(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data", "/host/d"),
        ("/data/", "/host/d/"),
        ("/data/x.npz", "/host/d/x.npz"),
        ("/data/deep/x", "/host/deep/x"),
        ("file:///data/x", "file:///host/d/x"),
        ("--dir=/data --log=/data2", "--dir=/host/d --log=/data2"),
        ("/a:/data:/b", "/a:/host/d:/b"),
        (json.dumps({"uri": "/data", "n": 1}), json.dumps({"uri": "/host/d", "n": 1})),
        ("echo hi >/dev/termination-log", "echo hi >/host/t"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("http:///data", "http:///data"),
        ("/old/data", "/old/data"),
        ("/data-old", "/data-old"),
        ("./data", "./data"),
        ("/data.txt", "/data.txt"),
    ],
)
def test_mentions_of_mounted_paths_move_and_nothing_else_does(text, expected):
    moved = PathMap({"/data/": "/host/d", "/data/deep": "/host/deep", "/dev/termination-log": "/host/t"})
    assert moved(text) == expected


@given(st.text(max_size=40))
def test_without_mounts_no_text_changes(text):
    assert PathMap({})(text) == text
