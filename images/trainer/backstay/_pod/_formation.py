"""Connects the pods of a rank, and lets JAX use the devices of all of them as one.

JAX must know the other processes before it uses a device. The members find each other by shard 0's server, and not by
DNS, which would be late for new pods. All waiting happens here: a process whose `jax.distributed.initialize` times out
aborts.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, Protocol

from backstay_spec import contract

from .._process import SIGTERM_EXIT, Environment, Stop, end_now, script_stacks
from .._transport import ALONE, TEXT, ControlClient, FollowingMember, LeadingMember, Members, OwnMember
from ..errors import CheckpointError, ConfigurationError, PeerLost, WaitedTooLong

__all__ = ["end_in_order", "form_rank"]

_LOG = logging.getLogger(__name__)

_FORMED: list[Members] = []  # by this process
_IN_ORDER: Final = threading.Event()  # the other pods of the rank end as this one

_LEVEL: Final = "GRPC_VERBOSITY"
_AGAIN = 0.1  # seconds between two calls of shard 0's server
_INITIALIZE = 60  # seconds; all members are connected when it begins
_SHUTDOWN = 3600  # seconds that the end of a process waits in JAX for the ends of the others
_CLEAN_UP = 5.0  # seconds for the clean-up of a script that has raised
_LEAVE = 10.0  # seconds for the end of JAX, when the scripts of all have ended


def form_rank(environment: Environment, stop: Stop) -> Members:
    """Returns the pods of this worker's rank, once all of them are connected; of any other pod, itself.

    The second call returns the same.

    Raises:
        SystemExit: the pod received SIGTERM.
        Superseded: the pod was replaced.
        WaitedTooLong: the pods have no place to find each other.
        ConfigurationError: the script has used a device already.
    """
    from .._roles import Stopped

    if environment.members == 1:
        return ALONE
    if not _FORMED:
        try:
            _FORMED.append(_form(environment, stop))
            atexit.register(_end_together, _FORMED[0])
        except Stopped:
            sys.exit(SIGTERM_EXIT)
    return _FORMED[0]


def end_in_order() -> None:
    """The other pods of the rank end too, because `train` has returned in all of them, or all were stopped."""
    _IN_ORDER.set()


def _form(environment: Environment, stop: Stop) -> Members:
    own = OwnMember(
        environment.peer,
        environment.members,
        environment.credentials,
        _Lost(environment),
        environment.timeouts.heartbeat,
        script_stacks,
    )
    place: _MeetingPlace
    if environment.trained is None:
        place = ControlClient(environment.servers[:1], environment.credentials, own.peer, environment.timeouts)
    else:
        place = _StoredAddress(environment)
    try:
        members: LeadingMember | FollowingMember
        if environment.member == 0:
            members = leader = LeadingMember(own, environment.bind)
            _lead(environment, leader, place, stop)
        else:
            members = _follow(environment, place, stop, own)
    finally:
        place.close()
    ip = environment.pod_ip
    address = members.share("JAX coordinator", TEXT, lambda: _address(ip, _free_port(ip)))
    _initialize(environment, address)
    return members


class _MeetingPlace(Protocol):
    """Where the pods of a rank get the address of the first one: shard 0's server, or the checkpoint folder."""

    def meet(self, address: str = "") -> str:
        """See `ControlClient.meet`."""
        ...

    def close(self) -> None: ...


class _StoredAddress:
    """A file in the checkpoint folder, for a rank that is created after training. The servers have left then."""

    def __init__(self, environment: Environment) -> None:
        from .._checkpoint import open_folder

        own = f"{environment.short_uid}-{environment.index}-{environment.incarnation}"
        self._name, self._writes = f"address-of-rank-{own}", environment.member == 0
        self._folder = open_folder(environment.checkpoint_uri or "")
        self._written = ""

    def meet(self, address: str = "") -> str:
        try:
            if address and address != self._written:
                self._folder.replace(self._name, address.encode())
                self._written = address
            return address or self._folder.read(self._name).decode()
        except (OSError, CheckpointError) as error:
            raise PeerLost(f"the checkpoint folder: {error}") from error

    def close(self) -> None:
        if self._writes:
            with contextlib.suppress(OSError, CheckpointError):
                self._folder.delete(self._name)


class _Lost:
    """Ends this process when another pod of its rank is lost. Its main thread may wait in a collective of XLA."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def __call__(self, member: int, why: str) -> None:
        environment = self._environment
        text = f"pod {member} of {environment.role} {environment.index} is lost: {why}"
        _LOG.warning("%s", text)
        end_now(environment.termination_log, {"reason": contract.GROUP_LOST, "message": text}, contract.GROUP_LOST_EXIT)


def _lead(environment: Environment, leader: LeadingMember, place: _MeetingPlace, stop: Stop) -> None:
    """Report where this pod listens, until all others are connected."""
    address = _address(environment.pod_ip, leader.port)
    wait = _Meeting(environment, stop)
    while missing := leader.linked(_AGAIN):
        named = ", ".join(map(str, missing))
        wait.check(f"these pods of {environment.role} {environment.index} are not connected: {named}")
        try:
            place.meet(address)
            wait.answered()
        except PeerLost as error:
            _LOG.debug("the address of this pod was not reported: %s", error)


def _follow(environment: Environment, place: _MeetingPlace, stop: Stop, own: OwnMember) -> FollowingMember:
    wait = _Meeting(environment, stop)
    while True:
        wait.check(f"pod 0 of {environment.role} {environment.index} has not reported its address")
        try:
            address = place.meet()
            wait.answered()
            if address:
                return FollowingMember(own, address)
        except PeerLost as error:
            _LOG.debug("pod 0 cannot be found: %s", error)
        time.sleep(_AGAIN)


class _Meeting:
    """Ends a wait when the pod is stopped, or when the meeting place does not answer for long, and logs its reason.

    Another pod of the rank may wait for a node for any time. The operator ends a rank of which all pods run.
    """

    def __init__(self, environment: Environment, stop: Stop) -> None:
        self._times, self._stop = environment.timeouts, stop
        self._answered = self._said = time.monotonic()

    def answered(self) -> None:
        """The meeting place has answered."""
        self._answered = time.monotonic()

    def check(self, why: str) -> None:
        """Raises `Stopped`, `WaitedTooLong`."""
        from .._roles import Stopped

        if self._stop.requested.is_set():
            raise Stopped
        now = time.monotonic()
        if now - self._answered > self._times.join:
            raise WaitedTooLong(f"{why}, and nothing has answered for {self._times.join:.0f} s")
        if now - self._said > self._times.silent:
            self._said = now
            _LOG.warning("waiting: %s", why)


def _initialize(environment: Environment, address: str) -> None:
    """Connect JAX with the other processes. The leader listens on `address`."""
    import jax

    if environment.member:  # a client that comes before the service waits for a second
        _until_it_listens(address)
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]  # it takes SIGTERM
    wanted = {
        "cluster_detection_method": "deactivate",
        "initialization_timeout": _INITIALIZE,
        # The members' own connection shows a loss; JAX would abort the process.
        "heartbeat_timeout_seconds": max(600, int(2 * environment.config.stall_seconds)),
        "shutdown_timeout_seconds": _SHUTDOWN,
        "coordinator_bind_address": address,
    }
    initialize: Any = jax.distributed.initialize
    known = inspect.signature(initialize).parameters
    _let_all_write()
    options = {name: value for name, value in wanted.items() if name in known}
    try:
        with _reason_of_abort():
            initialize(address, environment.members, environment.member, **options)
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise ConfigurationError(
            "the script used a device of JAX before it called train. In a rank of several pods, JAX must first know "
            "the other pods. Call backstay.initialize() before, or compute in init, loss and batches, or after train"
        ) from error


@contextlib.contextmanager
def _reason_of_abort() -> Iterator[None]:
    """Let JAX log why it aborts this process when the first pod of the rank is lost. Its copy of gRPC begins inside,
    and takes the level of all its messages from the environment. The copy of this process has begun before."""
    known = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = "ERROR"
    try:
        yield
    finally:
        os.environ.pop(_LEVEL)
        if known is not None:
            os.environ[_LEVEL] = known


def _end_together(members: Members) -> None:
    """Wait at the end of the script for the ends of the others, before JAX does. JAX would not notice a lost one.

    A script that ends early does not wait, because the others may wait for this pod in a collective. The end of this
    process ends them too.
    """
    raised = getattr(sys, "last_type", None) is not None  # Python sets it when an exception ends the script
    if raised:  # what it has begun on its devices may wait for the others too
        late = threading.Timer(_CLEAN_UP, os._exit, (1,))
        late.daemon = True
        late.start()
    if raised or not _IN_ORDER.is_set():
        _forget_jax()
        return
    members.close()
    left = threading.Event()
    threading.Thread(target=_leave_jax, args=(left,), name="backstay-leaves-jax", daemon=True).start()
    if not left.wait(_LEAVE):  # another pod has died since then
        _forget_jax()


def _leave_jax(left: threading.Event) -> None:
    """Disconnect JAX from the other processes, which do the same now."""
    import jax

    shutdown: Any = jax.distributed.shutdown  # which JAX leaves untyped
    with contextlib.suppress(Exception):  # the scripts have ended
        shutdown()
    left.set()


def _forget_jax() -> None:
    """Let this process end without JAX, which would wait for the others."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import distributed

        state = distributed.global_state
        kept = state.client, state.service  # their destructors would wait too
        threading.Thread(target=_keep, args=kept, name="backstay-keeps", daemon=True).start()
        state.client = state.service = None


def _keep(*objects: object) -> None:
    """Keep objects until the process ends. Python does not take them from a daemon thread."""
    threading.Event().wait()
    del objects


def _let_all_write() -> None:
    """Let each process write what it compiled to its cache, so that a replaced rank starts in half the time.

    JAX writes in process 0 only. On the CPU the keys of the others differ, so they would compile again each time. JAX
    has no setting for it (0.10.2); without the function that this replaces, a rank only starts later.
    """
    try:
        from jax._src import compiler, distributed

        write, state = compiler._cache_write, distributed.global_state
    except (ImportError, AttributeError):
        return

    def written(*arguments: Any, **more: Any) -> Any:
        own, state.process_id = state.process_id, 0
        try:
            return write(*arguments, **more)
        finally:
            state.process_id = own

    compiler._cache_write = written


def _until_it_listens(address: str) -> None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _INITIALIZE
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
            return
        except OSError:
            time.sleep(0.01)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
