"""The names and labels of everything that a job owns: pure functions of the job, so that two operators agree on them.

A name contains the job's name and five characters of the hash of its uid. A job that is created again under the same
name therefore never uses objects of the deleted job. Job names have at most 40 characters. The longest name here adds
23 to that, and a DNS-1035 label may have 63. A pod of a rank of several adds 27: names of pods may be longer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from backstay_spec import contract
from backstay_spec.types_status import Role, slot_key

# Beside the labels of the contract: two jobs may have had one name, and a selector must not catch the dead one's pods.
LABEL_JOB_UID: Final = f"{contract.GROUP}/job-uid"
LABEL_APP_NAME: Final = "app.kubernetes.io/name"
LABEL_APP_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_APP_COMPONENT: Final = "app.kubernetes.io/component"
LABEL_APP_PART_OF: Final = "app.kubernetes.io/part-of"
LABEL_APP_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "backstay"

ROLE_OF_LABEL: Final[dict[str, Role]] = {
    contract.ROLE_SERVER: "ParameterServer",
    contract.ROLE_WORKER: "Worker",
    contract.ROLE_EVALUATOR: "Evaluator",
}
_SHORT: Final = {contract.ROLE_SERVER: "ps", contract.ROLE_WORKER: "worker", contract.ROLE_EVALUATOR: "eval"}
_TEXT: Final = {
    contract.ROLE_SERVER: "parameter server",
    contract.ROLE_WORKER: "worker",
    contract.ROLE_EVALUATOR: "evaluator",
}
# No vowels, so that no word is spelled by accident; 27 letters to the fifth are 14 million.
_ALPHABET: Final = "bcdfghjklmnpqrstvwxz2456789"


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The position that a pod fills, with a role and an index. A slot has many pods, one after the other.

    Attributes:
        role: value of the role label (`contract.ROLE_WORKER`, ...).
        index: shard, rank, or 0.
    """

    role: str
    index: int

    @property
    def key(self) -> str:
        """The key of the slot in `status.incarnations`."""
        return slot_key(self.role, self.index)

    @property
    def text(self) -> str:
        """The slot to print, such as ``worker 3``."""
        return _TEXT[self.role] if self.role == contract.ROLE_EVALUATOR else f"{_TEXT[self.role]} {self.index}"


def fraction(name: str) -> float:
    """Returns a number of at least 0 and less than 1 for a name, evenly spread over the names."""
    return _number(name) / 2**64


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@lru_cache(maxsize=4096)
def short_hash(uid: str) -> str:
    """Five characters of a uid hashed."""
    number = _number(uid)
    letters = []
    for _ in range(5):
        number, digit = divmod(number, len(_ALPHABET))
        letters.append(_ALPHABET[digit])
    return "".join(letters)


def pod_name(job: str, uid: str, slot: Slot, incarnation: int, member: int | None = None) -> str:
    """``{job}-{ps|worker|eval}-{index}-{incarnation}-{hash}``. A pod of a rank of several has ``-{member}`` behind the
    index.

    Args:
        member: the index of the pod inside its rank; None: the rank has one pod.
    """
    own = slot.index if member is None else f"{slot.index}-{member}"
    return f"{job}-{_SHORT[slot.role]}-{own}-{incarnation}-{short_hash(uid)}"


def members_of(slot: Slot, pods_per_rank: int) -> tuple[int | None, ...]:
    """Returns the members of a slot's rank, as `pod_name` takes them. Only workers have ranks of several pods."""
    count = pods_per_rank if slot.role == contract.ROLE_WORKER else 1
    return (None,) if count == 1 else tuple(range(count))


def pod_names(job: str, uid: str, slot: Slot, incarnation: int, pods_per_rank: int) -> tuple[str, ...]:
    """Returns the names of the pods of a slot's rank, in the order of `members_of`."""
    return tuple(pod_name(job, uid, slot, incarnation, member) for member in members_of(slot, pods_per_rank))


def service_name(job: str, uid: str, shard: int) -> str:
    """Returns the name of the Service of a shard, ``{job}-ps-{shard}-{hash}``."""
    return f"{job}-ps-{shard}-{short_hash(uid)}"


def queue_group_name(job: str, uid: str, number: int) -> str:
    """Returns the name of the pods that a queue admits together, ``{job}-group-{number}-{hash}``."""
    return f"{job}-group-{number}-{short_hash(uid)}"


def secret_name(job: str, uid: str) -> str:
    """Returns the name of the Secret with the job's token, ``{job}-token-{hash}``."""
    return f"{job}-token-{short_hash(uid)}"


def network_policy_name(job: str, uid: str) -> str:
    """Returns the name of the NetworkPolicy of all pods of the job, ``{job}-ingress-{hash}``."""
    return f"{job}-ingress-{short_hash(uid)}"


def members_policy_name(job: str, uid: str) -> str:
    """Returns the name of the NetworkPolicy of workers in ranks of several pods, ``{job}-members-{hash}``."""
    return f"{job}-members-{short_hash(uid)}"


def job_labels(job: str, uid: str) -> dict[str, str]:
    """Returns the labels that select a job's objects, and no other's of the same name."""
    return {contract.LABEL_JOB: job, LABEL_JOB_UID: uid}


def object_labels(job: str, uid: str, component: str) -> dict[str, str]:
    """Returns the labels of an object that belongs to a job: ours and the recommended ones."""
    return {
        **job_labels(job, uid),
        LABEL_APP_NAME: "trainingjob",
        LABEL_APP_INSTANCE: job,
        LABEL_APP_COMPONENT: component,
        LABEL_APP_PART_OF: MANAGER,
        LABEL_APP_MANAGED_BY: MANAGER,
    }


def slot_selector(job: str, uid: str, slot: Slot) -> dict[str, str]:
    """Returns the labels that every incarnation of one slot has."""
    return {**job_labels(job, uid), contract.LABEL_ROLE: slot.role, contract.LABEL_INDEX: str(slot.index)}


def slot_labels(job: str, uid: str, slot: Slot, incarnation: int) -> dict[str, str]:
    """Returns the labels by which a Service selects one incarnation of one slot (O3)."""
    return {**slot_selector(job, uid, slot), contract.LABEL_INCARNATION: str(incarnation)}
