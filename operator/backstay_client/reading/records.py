"""Records that a job has left: beside its checkpoints, or in the folder of an embedded cluster."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster
from backstay_client.view.pods import slot_of
from backstay_spec import contract
from backstay_spec.records import RECORD_NAME

__all__ = [
    "all_of",
    "checkpoint_places",
    "newest_of_each_server",
    "places_of",
    "read_file",
    "servers_of_shard_0",
    "unpacked",
]


_MOST_BYTES: Final = 1 << 30


def places_of(cluster: FoundCluster, job: dict[str, Any]) -> list[str]:
    """Folders and URIs in which the job's records may be.

    Args:
        job: the TrainingJob.
    """
    meta = job["metadata"]
    places = []
    if cluster.folder is not None:
        pods = cluster.folder / "pods" / meta["namespace"]
        places += sorted(str(folder) for folder in pods.glob(f"{meta['name']}-*") if folder.is_dir())
    return places + checkpoint_places(job)


def checkpoint_places(job: dict[str, Any]) -> list[str]:
    """Returns the folder or URI of a job's checkpoints, in a list; an empty one if it has none."""
    spec, status = job.get("spec") or {}, job.get("status") or {}
    stored = (status.get("checkpoint") or {}).get("uri") or ""
    folder = stored.rpartition("/")[0] or (spec.get("checkpoint") or {}).get("uri")
    return [folder.removeprefix("file://")] if folder else []


def newest_of_each_server(places: list[str], kind: str, uid: str = "") -> list[str]:
    """Returns the place of the newest record of a kind of each server of shard 0, for one job, the newest record first.

    Args:
        kind: the kind of records, such as ``trace``. Their names contain the uid of the job and end in the incarnation
            of the server.
        uid: the job's uid; empty: the job of the newest record.
    """
    found = _found(places, kind, uid)
    if not found:
        return []
    job = max(found).split("-")[2]
    of_server = {name.partition(".")[0].rpartition("-")[2]: name for name in sorted(found) if name.split("-")[2] == job}
    return [f"{found[name]}/{name}" for name in sorted(of_server.values(), reverse=True)]


def all_of(places: list[str], kind: str, uid: str = "") -> Iterator[tuple[str, bytes]]:
    """Yields all records of a kind that can be read, oldest first; one that is in two folders once.

    Args:
        kind: ``trace``, ``report`` or ``history``.
        uid: the uid of the job whose records count; empty: the records of all jobs.
    """
    for name, place in sorted(_found(places, kind, uid).items()):
        with contextlib.suppress(BadInput):  # deleted meanwhile, or another user's
            yield f"{place}/{name}", read_file(f"{place}/{name}")


def _found(places: list[str], kind: str, uid: str) -> dict[str, str]:
    """Returns the folder of each record."""
    own = f"-{uid.replace('-', '')[:8]}" if uid else ""
    return {name: place for place in places for name in _names(place) if name.startswith(f"{kind}-") and own in name}


def _names(place: str) -> list[str]:
    try:
        if "://" in place:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(place)
            listed = [str(entry).rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False)]
        else:
            listed = [entry.name for entry in Path(place).iterdir()]
    except Exception:  # noqa: BLE001  # each back end of fsspec has its own
        return []  # for example a volume of the cluster
    return [name for name in listed if RECORD_NAME.fullmatch(name)]


def read_file(place: str) -> bytes:
    """Returns the content of a file, or of a URI.

    Raises:
        BadInput: the file cannot be read.
    """
    try:
        if "://" in place:
            import fsspec

            with fsspec.open(place, "rb") as file:
                return bytes(file.read())
        return Path(place).read_bytes()
    except Exception as error:  # noqa: BLE001  # each back end of fsspec has its own
        raise BadInput(f"{place} cannot be read: {error}") from None


def unpacked(data: bytes, most: int = _MOST_BYTES) -> bytes:
    """`data`, decompressed if it is a gzip file.

    Args:
        most: bytes of the result.

    Raises:
        BadInput: the file is damaged, or the result is larger.
    """
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"the file is damaged: {error}") from None
    if len(found) > most:
        raise BadInput(f"the file is too large: must have at most {most} bytes when it is decompressed")
    return found


def servers_of_shard_0(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the running pods that may hold the job's timeline, the newest first."""
    found = [
        pod
        for pod in pods
        if slot_of(pod)[:2] == (contract.ROLE_SERVER, 0) and pod.get("status", {}).get("phase") == "Running"
    ]
    return sorted(found, key=slot_of, reverse=True)
