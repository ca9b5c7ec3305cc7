"""Entries of a job's history from several records."""

from __future__ import annotations

from backstay_spec.records import RECORD_NAME, merged


def entry(reason: str, time: str = "2026-11-22T10:00:00Z", **more: str) -> dict[str, str]:
    return {"time": time, "reason": reason, **more}


def test_entries_of_one_time_keep_their_order_and_newer_ones_replace_older_ones() -> None:
    """A death and the rollback that it caused are of one plan, and so of one time."""
    died, back, began = entry("Stalled", slot="worker-1"), entry("RolledBack"), entry("Running", "2026-11-22T09:00:00Z")
    again = {**died, "report": "file"}
    assert merged([died, back], ["nonsense", 3, None], [began, again]) == [began, again, back]


def test_names_of_records() -> None:
    for name in ("trace-000000000001-u-1.pb.gz", "report-001795341600-worker-3-1-12345678.json"):
        assert RECORD_NAME.fullmatch(name), name
    for name in ("trace-1-u.pb.gz", "step-000000000001-term-00000001.manifest.json", "history-000000000001-U.json"):
        assert not RECORD_NAME.fullmatch(name), name
