"""The model of every part of a job's status, and the forms of its times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

__all__ = ["PreciseTime", "StatusModel", "Time", "format_precise_time", "format_time"]


def _whole_seconds(value: datetime) -> datetime:
    """metav1.Time has whole seconds and UTC; a model must equal itself after a round trip."""
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return aware.astimezone(UTC).replace(microsecond=0)


def format_time(value: datetime) -> str:
    """Returns a time as metav1.Time writes it: ``2026-01-31T12:00:00Z``."""
    return _whole_seconds(value).strftime("%Y-%m-%dT%H:%M:%SZ")


def _milliseconds(value: datetime) -> datetime:
    aware = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return aware.astimezone(UTC).replace(microsecond=aware.microsecond // 1000 * 1000)


def format_precise_time(value: datetime) -> str:
    """Returns a time with milliseconds, such as ``2026-01-31T12:00:00.250Z``, which RFC 3339 and so `date-time`
    allow."""
    return _milliseconds(value).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


Time: TypeAlias = Annotated[
    datetime,
    Field(strict=False),
    AfterValidator(_whole_seconds),
    PlainSerializer(format_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
# For the operator's own reckoning: rounded to whole seconds, the first back-off of 1 s would be anything up to 2 s.
PreciseTime: TypeAlias = Annotated[
    datetime,
    Field(strict=False),
    AfterValidator(_milliseconds),
    PlainSerializer(format_precise_time, when_used="json"),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class StatusModel(BaseModel):
    """A part of the status, which is immutable and drops unknown fields, so an older operator can read a newer one's
    status."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )
