"""Label and field selectors select what they say, and malformed ones say what was expected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.apiserver.errors import ApiError
from backstay_cluster.apiserver.selectors import matcher, parse_labels

PODS = ("", "pods")
KEYS, VALUES = st.sampled_from(["a", "b", "x.io/c"]), st.sampled_from(["", "1", "2", "v-3"])
REQUIREMENTS = st.one_of(
    st.tuples(st.sampled_from(["=", "==", "!="]), KEYS, VALUES),
    st.tuples(st.sampled_from(["in", "notin"]), KEYS, st.sets(VALUES, min_size=1)),
    st.tuples(st.sampled_from(["exists", "!"]), KEYS, st.none()),
)


def written(requirement, space):
    op, key, value = requirement
    if op == "exists":
        return f"{space}{key}{space}"
    if op == "!":
        return f"!{space}{key}"
    if op in {"in", "notin"}:
        return f"{key} {op} ({f',{space}'.join(sorted(value))})"
    return f"{key}{space}{op}{space}{value}"


def fulfilled(requirement, labels):
    op, key, value = requirement
    if op in {"=", "=="}:
        return labels.get(key) == value
    if op == "!=":
        return labels.get(key) != value
    if op == "in":
        return labels.get(key) in value
    if op == "notin":
        return labels.get(key) not in value
    return (key in labels) == (op == "exists")


@given(st.lists(REQUIREMENTS, max_size=3), st.dictionaries(KEYS, VALUES), st.sampled_from(["", " "]))
def test_a_selector_selects_what_fulfils_all_its_requirements(requirements, labels, space):
    text = ",".join(written(r, space) for r in requirements)
    selects = matcher(PODS, text, "")
    expected = all(fulfilled(r, labels) for r in requirements)
    assert (selects is None or selects({"metadata": {"labels": labels}})) == expected


@given(st.text(alphabet="ab!=,() <>in", max_size=12))
def test_any_text_is_a_selector_or_a_bad_request(text):
    try:
        parse_labels(text)
    except ApiError as error:
        assert error.code == 400  # noqa: PT017  # there may be none


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==", "found '==', expected: !, identifier, or 'end of string'"),
        ("a,", "found '', expected: identifier after ','"),
        ("a in b", "found 'b' expected: '('"),
        ("a b", "found 'b', expected: in, notin, =, ==, !=, gt, lt"),
        ("a>x", "for 'Gt', 'Lt' operators, the value must be an integer"),
    ],
)
def test_the_error_of_a_malformed_selector_names_what_was_expected(text, said):
    with pytest.raises(ApiError) as caught:
        parse_labels(text)
    assert caught.value.message == said


def test_greater_and_less():
    assert matcher(PODS, "n>2,n<5", "")({"metadata": {"labels": {"n": "3"}}})
    assert not matcher(PODS, "n>2", "")({"metadata": {"labels": {"n": "two"}}})


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("metadata.name=p", True),
        ("metadata.name!=p", False),
        ("status.phase=Running,spec.nodeName=n", True),
        ("spec.nodeName=", False),
        ("status.podIP==", True),
        ("spec.hostNetwork=false", True),
        ("metadata.name=a\\,b", False),
    ],
)
def test_field_selectors(text, selected):
    pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {"phase": "Running"}}
    assert matcher(PODS, "", text)(pod) is selected


@pytest.mark.parametrize("text", ["spec.foo=1", "metadata.name", "status.phase>1"])
def test_a_field_that_cannot_be_selected_by_is_a_bad_request(text):
    with pytest.raises(ApiError) as caught:
        matcher(PODS, "", text)
    assert caught.value.code == 400
