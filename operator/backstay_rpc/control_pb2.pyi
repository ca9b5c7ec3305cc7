from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Activity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTIVITY_UNSPECIFIED: _ClassVar[Activity]
    STARTING: _ClassVar[Activity]
    COMPILING: _ClassVar[Activity]
    TRAINING: _ClassVar[Activity]
    WAITING: _ClassVar[Activity]
    LEAVING: _ClassVar[Activity]

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_UNSPECIFIED: _ClassVar[RejectReason]
    LATE: _ClassVar[RejectReason]
    DUPLICATE: _ClassVar[RejectReason]
    STALE: _ClassVar[RejectReason]
    OLD_TERM: _ClassVar[RejectReason]
    OLD_INCARNATION: _ClassVar[RejectReason]
    NOT_IN_WORLD: _ClassVar[RejectReason]
    ABANDONED: _ClassVar[RejectReason]
    OUT_OF_ORDER: _ClassVar[RejectReason]
    SKIPPED: _ClassVar[RejectReason]
ACTIVITY_UNSPECIFIED: Activity
STARTING: Activity
COMPILING: Activity
TRAINING: Activity
WAITING: Activity
LEAVING: Activity
REJECT_UNSPECIFIED: RejectReason
LATE: RejectReason
DUPLICATE: RejectReason
STALE: RejectReason
OLD_TERM: RejectReason
OLD_INCARNATION: RejectReason
NOT_IN_WORLD: RejectReason
ABANDONED: RejectReason
OUT_OF_ORDER: RejectReason
SKIPPED: RejectReason

class PingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Peer(_message.Message):
    __slots__ = ("role", "index", "incarnation", "pod", "member")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    POD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    role: str
    index: int
    incarnation: int
    pod: str
    member: int
    def __init__(self, role: _Optional[str] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., pod: _Optional[str] = ..., member: _Optional[int] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("peer", "address")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    address: str
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., address: _Optional[str] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("path", "shape", "dtype")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    path: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, path: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("peer", "shard", "expected_incarnation", "leaves", "term", "version", "settings", "frozen", "frozen_from")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FROM_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    shard: int
    expected_incarnation: int
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    term: int
    version: int
    settings: _containers.ScalarMap[str, str]
    frozen: _containers.RepeatedScalarFieldContainer[str]
    frozen_from: str
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., shard: _Optional[int] = ..., expected_incarnation: _Optional[int] = ..., leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., term: _Optional[int] = ..., version: _Optional[int] = ..., settings: _Optional[_Mapping[str, str]] = ..., frozen: _Optional[_Iterable[str]] = ..., frozen_from: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "term", "version", "data_address", "key_step", "done", "failed", "began", "frozen_from")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FROM_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    term: int
    version: int
    data_address: str
    key_step: int
    done: bool
    failed: str
    began: int
    frozen_from: str
    def __init__(self, incarnation: _Optional[int] = ..., term: _Optional[int] = ..., version: _Optional[int] = ..., data_address: _Optional[str] = ..., key_step: _Optional[int] = ..., done: bool = ..., failed: _Optional[str] = ..., began: _Optional[int] = ..., frozen_from: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("peer", "shard", "expected_incarnation", "activity", "step_seconds", "doing", "parts", "worker_seconds", "spans", "hang_report", "kept")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    HANG_REPORT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    shard: int
    expected_incarnation: int
    activity: Activity
    step_seconds: float
    doing: Doing
    parts: _containers.ScalarMap[str, float]
    worker_seconds: WorkerSeconds
    spans: bytes
    hang_report: HangReport
    kept: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., shard: _Optional[int] = ..., expected_incarnation: _Optional[int] = ..., activity: _Optional[_Union[Activity, str]] = ..., step_seconds: _Optional[float] = ..., doing: _Optional[_Union[Doing, _Mapping]] = ..., parts: _Optional[_Mapping[str, float]] = ..., worker_seconds: _Optional[_Union[WorkerSeconds, _Mapping]] = ..., spans: _Optional[bytes] = ..., hang_report: _Optional[_Union[HangReport, _Mapping]] = ..., kept: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HangReport(_message.Message):
    __slots__ = ("stacks", "output", "doing")
    STACKS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    stacks: str
    output: str
    doing: str
    def __init__(self, stacks: _Optional[str] = ..., output: _Optional[str] = ..., doing: _Optional[str] = ...) -> None: ...

class Spans(_message.Message):
    __slots__ = ("peer", "lost", "clock", "unix_seconds", "offsets", "points", "threads", "point", "thread", "began", "lasted", "step", "notes")
    class NotesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    POINT_FIELD_NUMBER: _ClassVar[int]
    THREAD_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    LASTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    lost: int
    clock: float
    unix_seconds: float
    offsets: _containers.RepeatedCompositeFieldContainer[ClockOffset]
    points: _containers.RepeatedScalarFieldContainer[str]
    threads: _containers.RepeatedScalarFieldContainer[str]
    point: _containers.RepeatedScalarFieldContainer[int]
    thread: _containers.RepeatedScalarFieldContainer[int]
    began: _containers.RepeatedScalarFieldContainer[int]
    lasted: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    notes: _containers.ScalarMap[int, str]
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., lost: _Optional[int] = ..., clock: _Optional[float] = ..., unix_seconds: _Optional[float] = ..., offsets: _Optional[_Iterable[_Union[ClockOffset, _Mapping]]] = ..., points: _Optional[_Iterable[str]] = ..., threads: _Optional[_Iterable[str]] = ..., point: _Optional[_Iterable[int]] = ..., thread: _Optional[_Iterable[int]] = ..., began: _Optional[_Iterable[int]] = ..., lasted: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., notes: _Optional[_Mapping[int, str]] = ...) -> None: ...

class ClockOffset(_message.Message):
    __slots__ = ("shard", "incarnation", "seconds", "error")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnation: int
    seconds: float
    error: float
    def __init__(self, shard: _Optional[int] = ..., incarnation: _Optional[int] = ..., seconds: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("job", "namespace", "uid", "server", "clock", "unix_seconds", "spans", "dropped")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    job: str
    namespace: str
    uid: str
    server: Peer
    clock: float
    unix_seconds: float
    spans: _containers.RepeatedScalarFieldContainer[bytes]
    dropped: int
    def __init__(self, job: _Optional[str] = ..., namespace: _Optional[str] = ..., uid: _Optional[str] = ..., server: _Optional[_Union[Peer, _Mapping]] = ..., clock: _Optional[float] = ..., unix_seconds: _Optional[float] = ..., spans: _Optional[_Iterable[bytes]] = ..., dropped: _Optional[int] = ...) -> None: ...

class WorkerSeconds(_message.Message):
    __slots__ = ("rank", "incarnation", "seconds", "version", "unsaved", "ago")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_FIELD_NUMBER: _ClassVar[int]
    AGO_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    seconds: _containers.RepeatedScalarFieldContainer[float]
    version: int
    unsaved: float
    ago: float
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., seconds: _Optional[_Iterable[float]] = ..., version: _Optional[int] = ..., unsaved: _Optional[float] = ..., ago: _Optional[float] = ...) -> None: ...

class Doing(_message.Message):
    __slots__ = ("point", "step", "has_step", "seconds", "member")
    POINT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    point: str
    step: int
    has_step: bool
    seconds: float
    member: int
    def __init__(self, point: _Optional[str] = ..., step: _Optional[int] = ..., has_step: bool = ..., seconds: _Optional[float] = ..., member: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("world", "done", "incarnations", "failed", "checkpoint", "checkpoint_step", "already_complete", "evaluation", "clock", "spans")
    class IncarnationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class EvaluationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORLD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    ALREADY_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    world: int
    done: bool
    incarnations: _containers.ScalarMap[str, int]
    failed: str
    checkpoint: str
    checkpoint_step: int
    already_complete: bool
    evaluation: _containers.ScalarMap[str, float]
    clock: float
    spans: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, world: _Optional[int] = ..., done: bool = ..., incarnations: _Optional[_Mapping[str, int]] = ..., failed: _Optional[str] = ..., checkpoint: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., already_complete: bool = ..., evaluation: _Optional[_Mapping[str, float]] = ..., clock: _Optional[float] = ..., spans: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GradientId(_message.Message):
    __slots__ = ("term", "version", "rank", "key_step", "incarnation", "attempt")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KEY_STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    rank: int
    key_step: int
    incarnation: int
    attempt: int
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., rank: _Optional[int] = ..., key_step: _Optional[int] = ..., incarnation: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class GradientInfo(_message.Message):
    __slots__ = ("finite", "examples", "loss", "metrics", "zero", "same", "impure", "carried", "exact")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FINITE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ZERO_FIELD_NUMBER: _ClassVar[int]
    SAME_FIELD_NUMBER: _ClassVar[int]
    IMPURE_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    finite: bool
    examples: int
    loss: float
    metrics: _containers.ScalarMap[str, float]
    zero: ZeroLeaves
    same: ZeroLeaves
    impure: bool
    carried: int
    exact: int
    def __init__(self, finite: bool = ..., examples: _Optional[int] = ..., loss: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., zero: _Optional[_Union[ZeroLeaves, _Mapping]] = ..., same: _Optional[_Union[ZeroLeaves, _Mapping]] = ..., impure: bool = ..., carried: _Optional[int] = ..., exact: _Optional[int] = ...) -> None: ...

class ZeroLeaves(_message.Message):
    __slots__ = ("leaves",)
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    leaves: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, leaves: _Optional[_Iterable[int]] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("id", "info")
    ID_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    id: GradientId
    info: GradientInfo
    def __init__(self, id: _Optional[_Union[GradientId, _Mapping]] = ..., info: _Optional[_Union[GradientInfo, _Mapping]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("id", "weight")
    ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    id: GradientId
    weight: float
    def __init__(self, id: _Optional[_Union[GradientId, _Mapping]] = ..., weight: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("term", "version", "contributions", "world", "skip", "clip_factor", "checkpoint", "final", "offset")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    CLIP_FACTOR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    world: int
    skip: bool
    clip_factor: float
    checkpoint: bool
    final: bool
    offset: int
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., world: _Optional[int] = ..., skip: bool = ..., clip_factor: _Optional[float] = ..., checkpoint: bool = ..., final: bool = ..., offset: _Optional[int] = ...) -> None: ...

class Gather(_message.Message):
    __slots__ = ("term", "version", "round", "index", "contributions")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    round: int
    index: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., index: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ...) -> None: ...

class NormRequest(_message.Message):
    __slots__ = ("term", "version", "contributions", "round", "replicate", "unclipped")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICATE_FIELD_NUMBER: _ClassVar[int]
    UNCLIPPED_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    round: int
    replicate: bool
    unclipped: bool
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., round: _Optional[int] = ..., replicate: bool = ..., unclipped: bool = ...) -> None: ...

class Norm(_message.Message):
    __slots__ = ("term", "version", "sum_of_squares", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SUM_OF_SQUARES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    sum_of_squares: float
    round: int
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., sum_of_squares: _Optional[float] = ..., round: _Optional[int] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("id", "reason", "next_key_step")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEXT_KEY_STEP_FIELD_NUMBER: _ClassVar[int]
    id: GradientId
    reason: RejectReason
    next_key_step: int
    def __init__(self, id: _Optional[_Union[GradientId, _Mapping]] = ..., reason: _Optional[_Union[RejectReason, str]] = ..., next_key_step: _Optional[int] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("term", "version")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class CoordinateRequest(_message.Message):
    __slots__ = ("peer", "coordinator", "leaves", "settings")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    coordinator: int
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    settings: _containers.ScalarMap[str, str]
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., coordinator: _Optional[int] = ..., leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., settings: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CoordinateReply(_message.Message):
    __slots__ = ("incarnation", "data_address", "link")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    data_address: str
    link: int
    def __init__(self, incarnation: _Optional[int] = ..., data_address: _Optional[str] = ..., link: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("term", "version", "last", "prepared", "begun", "link", "saves")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    last: Commit
    prepared: _containers.RepeatedCompositeFieldContainer[Contribution]
    begun: int
    link: int
    saves: int
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., prepared: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., begun: _Optional[int] = ..., link: _Optional[int] = ..., saves: _Optional[int] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("term", "version", "files", "error")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    files: _containers.RepeatedCompositeFieldContainer[File]
    error: str
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., error: _Optional[str] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("name", "size", "sha256", "ranges")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    sha256: str
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("key", "start", "stop")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    key: str
    start: int
    stop: int
    def __init__(self, key: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: GradientId
    def __init__(self, id: _Optional[_Union[GradientId, _Mapping]] = ...) -> None: ...

class Occupied(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedCompositeFieldContainer[GradientId]
    def __init__(self, ids: _Optional[_Iterable[_Union[GradientId, _Mapping]]] = ...) -> None: ...

class Examine(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: GradientId
    def __init__(self, id: _Optional[_Union[GradientId, _Mapping]] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ShardFailed(_message.Message):
    __slots__ = ("why", "reason")
    WHY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    why: str
    reason: str
    def __init__(self, why: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardMessage(_message.Message):
    __slots__ = ("staged", "norm", "written", "position", "lost", "applied", "failed", "ended", "occupied", "spans")
    STAGED_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    OCCUPIED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    staged: Staged
    norm: Norm
    written: Written
    position: Position
    lost: Lost
    applied: Applied
    failed: ShardFailed
    ended: Ended
    occupied: Occupied
    spans: Spans
    def __init__(self, staged: _Optional[_Union[Staged, _Mapping]] = ..., norm: _Optional[_Union[Norm, _Mapping]] = ..., written: _Optional[_Union[Written, _Mapping]] = ..., position: _Optional[_Union[Position, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., failed: _Optional[_Union[ShardFailed, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., occupied: _Optional[_Union[Occupied, _Mapping]] = ..., spans: _Optional[_Union[Spans, _Mapping]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("commit", "reject", "norm_request", "done", "rollback", "save", "gather", "examine")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    NORM_REQUEST_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    GATHER_FIELD_NUMBER: _ClassVar[int]
    EXAMINE_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    reject: Reject
    norm_request: NormRequest
    done: Done
    rollback: Rollback
    save: Save
    gather: Gather
    examine: Examine
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., norm_request: _Optional[_Union[NormRequest, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., gather: _Optional[_Union[Gather, _Mapping]] = ..., examine: _Optional[_Union[Examine, _Mapping]] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("term", "version", "checkpoint", "world", "offset", "history", "start_from")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    START_FROM_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    checkpoint: str
    world: int
    offset: int
    history: str
    start_from: str
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., checkpoint: _Optional[str] = ..., world: _Optional[int] = ..., offset: _Optional[int] = ..., history: _Optional[str] = ..., start_from: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("version", "checkpoint", "failed", "reason", "already_complete")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ALREADY_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    version: int
    checkpoint: str
    failed: str
    reason: str
    already_complete: bool
    def __init__(self, version: _Optional[int] = ..., checkpoint: _Optional[str] = ..., failed: _Optional[str] = ..., reason: _Optional[str] = ..., already_complete: bool = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ("shard", "expected_incarnation", "world", "incarnations", "checkpoint", "stall_seconds", "grace", "record", "record_id", "job_seconds")
    class IncarnationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RECORD_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_SECONDS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    expected_incarnation: int
    world: int
    incarnations: _containers.ScalarMap[str, int]
    checkpoint: CheckpointSettings
    stall_seconds: float
    grace: Grace
    record: str
    record_id: str
    job_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, shard: _Optional[int] = ..., expected_incarnation: _Optional[int] = ..., world: _Optional[int] = ..., incarnations: _Optional[_Mapping[str, int]] = ..., checkpoint: _Optional[_Union[CheckpointSettings, _Mapping]] = ..., stall_seconds: _Optional[float] = ..., grace: _Optional[_Union[Grace, _Mapping]] = ..., record: _Optional[str] = ..., record_id: _Optional[str] = ..., job_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class Grace(_message.Message):
    __slots__ = ("seconds", "auto")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    AUTO_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    auto: bool
    def __init__(self, seconds: _Optional[float] = ..., auto: bool = ...) -> None: ...

class CheckpointSettings(_message.Message):
    __slots__ = ("every_steps", "every_seconds", "keep")
    EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    EVERY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    every_steps: int
    every_seconds: float
    keep: int
    def __init__(self, every_steps: _Optional[int] = ..., every_seconds: _Optional[float] = ..., keep: _Optional[int] = ...) -> None: ...

class Stalled(_message.Message):
    __slots__ = ("rank", "incarnation", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ProgressReply(_message.Message):
    __slots__ = ("incarnation", "term", "step", "world", "stalled", "done", "contributed", "standby", "beating", "worker_seconds", "recorded", "death_reports", "report")
    class ContributedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class BeatingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    BEATING_FIELD_NUMBER: _ClassVar[int]
    WORKER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    DEATH_REPORTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    term: int
    step: int
    world: int
    stalled: _containers.RepeatedCompositeFieldContainer[Stalled]
    done: bool
    contributed: _containers.ScalarMap[int, int]
    standby: int
    beating: _containers.ScalarMap[int, int]
    worker_seconds: _containers.RepeatedCompositeFieldContainer[WorkerSeconds]
    recorded: str
    death_reports: _containers.RepeatedCompositeFieldContainer[StoredReport]
    report: bytes
    def __init__(self, incarnation: _Optional[int] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., world: _Optional[int] = ..., stalled: _Optional[_Iterable[_Union[Stalled, _Mapping]]] = ..., done: bool = ..., contributed: _Optional[_Mapping[int, int]] = ..., standby: _Optional[int] = ..., beating: _Optional[_Mapping[int, int]] = ..., worker_seconds: _Optional[_Iterable[_Union[WorkerSeconds, _Mapping]]] = ..., recorded: _Optional[str] = ..., death_reports: _Optional[_Iterable[_Union[StoredReport, _Mapping]]] = ..., report: _Optional[bytes] = ...) -> None: ...

class StoredReport(_message.Message):
    __slots__ = ("slot", "incarnation", "uri")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    slot: str
    incarnation: int
    uri: str
    def __init__(self, slot: _Optional[str] = ..., incarnation: _Optional[int] = ..., uri: _Optional[str] = ...) -> None: ...

class EvaluatedRequest(_message.Message):
    __slots__ = ("peer", "step", "metrics", "error", "checkpoint", "begins")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    step: int
    metrics: _containers.ScalarMap[str, float]
    error: str
    checkpoint: str
    begins: bool
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ..., checkpoint: _Optional[str] = ..., begins: bool = ...) -> None: ...

class EvaluatedReply(_message.Message):
    __slots__ = ("give_up",)
    GIVE_UP_FIELD_NUMBER: _ClassVar[int]
    give_up: str
    def __init__(self, give_up: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("peer", "trained", "spans")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    trained: bool
    spans: bytes
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., trained: bool = ..., spans: _Optional[bytes] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("peer", "shard", "expected_incarnation", "term", "partition_digest")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PARTITION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    peer: Peer
    shard: int
    expected_incarnation: int
    term: int
    partition_digest: bytes
    def __init__(self, peer: _Optional[_Union[Peer, _Mapping]] = ..., shard: _Optional[int] = ..., expected_incarnation: _Optional[int] = ..., term: _Optional[int] = ..., partition_digest: _Optional[bytes] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("push_begin", "chunk", "end", "pull", "params_begin", "refused", "abandon", "received", "replica", "to_coordinator", "to_shard", "member")
    PUSH_BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PARAMS_BEGIN_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TO_COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    TO_SHARD_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    push_begin: PushBegin
    chunk: Chunk
    end: End
    pull: Pull
    params_begin: ParamsBegin
    refused: Refused
    abandon: Abandon
    received: Received
    replica: Replica
    to_coordinator: ShardMessage
    to_shard: CoordinatorMessage
    member: MemberMessage
    def __init__(self, push_begin: _Optional[_Union[PushBegin, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., params_begin: _Optional[_Union[ParamsBegin, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., replica: _Optional[_Union[Replica, _Mapping]] = ..., to_coordinator: _Optional[_Union[ShardMessage, _Mapping]] = ..., to_shard: _Optional[_Union[CoordinatorMessage, _Mapping]] = ..., member: _Optional[_Union[MemberMessage, _Mapping]] = ...) -> None: ...

class MemberMessage(_message.Message):
    __slots__ = ("number", "point", "value", "error", "code", "text", "answer", "doing", "waits", "stacks")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    POINT_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    STACKS_FIELD_NUMBER: _ClassVar[int]
    number: int
    point: str
    value: bytes
    error: str
    code: str
    text: str
    answer: bool
    doing: Doing
    waits: bool
    stacks: str
    def __init__(self, number: _Optional[int] = ..., point: _Optional[str] = ..., value: _Optional[bytes] = ..., error: _Optional[str] = ..., code: _Optional[str] = ..., text: _Optional[str] = ..., answer: bool = ..., doing: _Optional[_Union[Doing, _Mapping]] = ..., waits: bool = ..., stacks: _Optional[str] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("state", "array", "whole", "mean", "commit", "held", "alive")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    state: ReplicaState
    array: ReplicaArray
    whole: bool
    mean: ReplicaMean
    commit: Commit
    held: bool
    alive: bool
    def __init__(self, state: _Optional[_Union[ReplicaState, _Mapping]] = ..., array: _Optional[_Union[ReplicaArray, _Mapping]] = ..., whole: bool = ..., mean: _Optional[_Union[ReplicaMean, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., held: bool = ..., alive: bool = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("term", "version", "world", "last", "coordinator", "start", "offset", "since_checkpoint", "history")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SINCE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    world: int
    last: Commit
    coordinator: str
    start: Rollback
    offset: int
    since_checkpoint: float
    history: str
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., world: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., coordinator: _Optional[str] = ..., start: _Optional[_Union[Rollback, _Mapping]] = ..., offset: _Optional[int] = ..., since_checkpoint: _Optional[float] = ..., history: _Optional[str] = ...) -> None: ...

class ReplicaArray(_message.Message):
    __slots__ = ("key", "start", "stop", "offset")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    key: str
    start: int
    stop: int
    offset: int
    def __init__(self, key: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ReplicaMean(_message.Message):
    __slots__ = ("version", "contributions", "infos", "whole")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    INFOS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    version: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    infos: _containers.RepeatedCompositeFieldContainer[GradientInfo]
    whole: bool
    def __init__(self, version: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., infos: _Optional[_Iterable[_Union[GradientInfo, _Mapping]]] = ..., whole: bool = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("contribution", "member", "shard")
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    contribution: GradientId
    member: int
    shard: int
    def __init__(self, contribution: _Optional[_Union[GradientId, _Mapping]] = ..., member: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class PushBegin(_message.Message):
    __slots__ = ("bytes", "part", "ask", "whole")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    part: Part
    ask: bool
    whole: End
    def __init__(self, bytes: _Optional[int] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., ask: bool = ..., whole: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("block", "offset")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("bytes", "info")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    info: GradientInfo
    def __init__(self, bytes: _Optional[int] = ..., info: _Optional[_Union[GradientInfo, _Mapping]] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("min_version", "values")
    class Values(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VALUES_ENCODED: _ClassVar[Pull.Values]
        VALUES_EXACT: _ClassVar[Pull.Values]
        VALUES_AVERAGE: _ClassVar[Pull.Values]
    VALUES_ENCODED: Pull.Values
    VALUES_EXACT: Pull.Values
    VALUES_AVERAGE: Pull.Values
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    min_version: int
    values: Pull.Values
    def __init__(self, min_version: _Optional[int] = ..., values: _Optional[_Union[Pull.Values, str]] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Received(_message.Message):
    __slots__ = ("moved_on",)
    MOVED_ON_FIELD_NUMBER: _ClassVar[int]
    moved_on: bool
    def __init__(self, moved_on: bool = ...) -> None: ...

class ParamsBegin(_message.Message):
    __slots__ = ("term", "version", "world", "bytes", "outcome", "next_key_step", "done", "whole", "offset", "ask")
    TERM_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NEXT_KEY_STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    term: int
    version: int
    world: int
    bytes: int
    outcome: RejectReason
    next_key_step: int
    done: bool
    whole: bool
    offset: int
    ask: bool
    def __init__(self, term: _Optional[int] = ..., version: _Optional[int] = ..., world: _Optional[int] = ..., bytes: _Optional[int] = ..., outcome: _Optional[_Union[RejectReason, str]] = ..., next_key_step: _Optional[int] = ..., done: bool = ..., whole: bool = ..., offset: _Optional[int] = ..., ask: bool = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
