"""Writes what each pod of a job did, on one clock, as a Chrome trace (`backstay trace`)."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster
from backstay_client.reading.history import history_of_place
from backstay_client.reading.jax_profile import joined, read_profile
from backstay_client.reading.records import newest_of_each_server, places_of, read_file, servers_of_shard_0, unpacked
from backstay_client.reading.timeline import BadTimeline, JobTimeline, chrome_trace, merged, read
from backstay_client.view.follow import ShownEntry, view_of
from backstay_client.words import count, duration, shortened

__all__ = ["WantedTrace", "Written", "stored_trace", "trace_of_file", "trace_of_job", "write_trace"]

_SECONDS = 30.0


@dataclass(frozen=True)
class WantedTrace:
    """The content of a trace.

    Attributes:
        last: write only this many seconds before the end; None: all.
        profile: a trace that `jax.profiler` made of the worker `rank`, or the folder with it; None: none is joined.
    """

    last: float | None = None
    profile: Path | None = None
    rank: int = 0


_ALL = WantedTrace()


@dataclass(frozen=True)
class Written:
    """A trace that was written.

    Attributes:
        source: where the timeline came from.
        profile_error: the largest error, in seconds, of the clock of the JAX profile beside that of its worker; None:
            no profile was joined.
    """

    out: Path
    job: JobTimeline
    source: str
    profile_error: float | None = None

    def summary(self) -> str:
        """Returns a description of the file."""
        pods = [pod for pod in self.job.pods if pod.spans]
        number, own = sum(len(pod.spans) for pod in pods), sum(not pod.title for pod in pods)
        known = [pod.clock.error for pod in pods if pod.clock.error is not None]
        exact = f"; their clocks agree within {max(known) * 1e3:.2g} ms" if known else ""
        if self.profile_error is not None:
            exact += f"; the clock of the JAX profile is that of its worker within {self.profile_error * 1e6:.2g} µs"
        first = min((pod.at(pod.spans[0].began) for pod in pods), default=0.0)
        last = max((pod.at(span.ended) for pod in pods for span in pod.spans), default=0.0)
        return (
            f"wrote {shortened(str(self.out))}: {count(number, 'span')} of {count(own, 'pod')} over "
            f"{duration(last - first)}, from {self.source}{exact}\nopen the file at https://ui.perfetto.dev"
        )


async def trace_of_job(cluster: FoundCluster, name: str, out: Path, wanted: WantedTrace = _ALL) -> Written:
    """Write the timeline of a job: as shard 0's server holds it now, else as it was stored last.

    Raises:
        BadInput: there is no timeline, or `out` cannot be written.
        ApiRequestError: there is no such job.
    """
    job = await cluster.api.get_job(cluster.namespace, name)
    pods = await cluster.api.pods_of(cluster.namespace, name, job["metadata"]["uid"])
    events = await cluster.api.events_of(cluster.namespace, job["metadata"]["uid"])
    history = view_of(job, pods, events).history
    for pod in servers_of_shard_0(pods):
        page = await cluster.api.pod_page(pod, "/trace", timeout=_SECONDS)
        if page:
            older = _readable(newest_of_each_server(places_of(cluster, job), "trace", job["metadata"]["uid"]))
            return write_trace(page, history, out, f"pod {pod['metadata']['name']}", wanted, older)
    written = stored_trace(places_of(cluster, job), history, out, wanted, job["metadata"]["uid"])
    if written is not None:
        return written
    if (job.get("spec") or {}).get("trace", {}).get("megabytes") == 0:
        raise BadInput(f"the job {name} keeps no timeline: spec.trace.megabytes is 0")
    raise BadInput(
        f"no timeline of the job {name} was found: shard 0's server does not run or cannot be reached. Its checkpoint "
        "folder has none that this machine can read; name a stored one with --from"
    )


def trace_of_file(place: str, out: Path, wanted: WantedTrace = _ALL) -> Written:
    """Write a timeline that was stored: a file, or the newest in a folder or URI.

    Raises:
        BadInput: no timeline is stored there, or `out` cannot be written.
    """
    if not place.endswith(".pb.gz"):
        place = place.rstrip("/")
        history: Sequence[ShownEntry] = ()
        with contextlib.suppress(BadInput):  # there is none
            history = history_of_place(place, None).view.history
        if (written := stored_trace([place], history, out, wanted)) is not None:
            return written
    return write_trace(unpacked(read_file(place)), (), out, shortened(place), wanted)


def stored_trace(
    places: list[str], history: Sequence[ShownEntry], out: Path, wanted: WantedTrace = _ALL, uid: str = ""
) -> Written | None:
    """Write the newest timeline that is stored in some folders. Returns None if there is none.

    Args:
        uid: the uid of the job whose timelines count; empty: the timelines of all jobs.

    Raises:
        BadInput: the timeline cannot be read, or `out` cannot be written.
    """
    found = newest_of_each_server(places, "trace", uid)
    if not found:
        return None
    newest, *older = found
    return write_trace(unpacked(read_file(newest)), history, out, shortened(newest), wanted, _readable(older))


def _readable(stored: Iterable[str]) -> Iterator[bytes]:
    """Yields the stored timelines that can be read. Only these have the spans of a server that was killed."""
    for place in stored:
        with contextlib.suppress(BadInput):  # deleted meanwhile, or torn while it was written
            yield unpacked(read_file(place))


def _put(out: Path, content: bytes) -> None:
    """Write a file completely or not at all. A link stays. A pipe or a device is written as it is, and not replaced."""
    if out.exists() and not out.is_file():
        out.write_bytes(content)
        return
    place = out.resolve()
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(place)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_trace(
    timeline: bytes,
    history: Sequence[ShownEntry],
    out: Path,
    source: str,
    wanted: WantedTrace = _ALL,
    older: Iterable[bytes] = (),
) -> Written:
    """Write a serialized `Timeline` as a Chrome trace; a name that ends in ``.gz`` is compressed.

    Args:
        older: timelines of the same job, of which it gets the spans that only they have. Those that cannot be read are
            left out.

    Raises:
        BadInput: `timeline` is not one, has no spans, the profile does not fit, or `out` cannot be written.
    """
    try:
        job = read(timeline)
    except BadTimeline as wrong:
        raise BadInput(f"{source}: {wrong}") from None
    for data in older:
        with contextlib.suppress(BadTimeline):
            other = read(data)
            job = merged(job, other) if other.uid == job.uid else job
    error = None
    if wanted.profile is not None:
        job, error = joined(job, read_profile(wanted.profile), wanted.rank)
    if wanted.last is not None:
        job = job.newest(wanted.last)
    if not any(pod.spans for pod in job.pods):
        raise BadInput(f"{source}: the timeline has no spans")
    text = json.dumps(chrome_trace(job, history), allow_nan=False, separators=(",", ":")).encode()
    if not out.name or out.is_dir():
        raise BadInput(f"--out: {out} is a folder: name a file")
    try:
        _put(out, gzip.compress(text) if out.suffix == ".gz" else text)
    except OSError as failed:
        raise BadInput(f"--out: {out} cannot be written: {failed.strerror or failed}") from None
    return Written(out, job, source, error)
