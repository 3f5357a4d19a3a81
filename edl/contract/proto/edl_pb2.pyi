from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Range(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("records", "block", "shards")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    records: int
    block: int
    shards: int
    def __init__(self, records: _Optional[int] = ..., block: _Optional[int] = ..., shards: _Optional[int] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("run_id", "generation", "hello", "ready", "key_value", "joined_ring", "stepped", "epoch_ended", "heartbeat", "left_ring", "leaving", "failed", "finished", "resume", "saved", "warned", "bad_records", "addresses", "checkpoint_part", "checkpoint_failed", "checkpointed", "evaluated", "history", "warm_started", "built", "rows_lost", "records_read")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    KEY_VALUE_FIELD_NUMBER: _ClassVar[int]
    JOINED_RING_FIELD_NUMBER: _ClassVar[int]
    STEPPED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEFT_RING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    WARNED_FIELD_NUMBER: _ClassVar[int]
    BAD_RECORDS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PART_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FAILED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    WARM_STARTED_FIELD_NUMBER: _ClassVar[int]
    BUILT_FIELD_NUMBER: _ClassVar[int]
    ROWS_LOST_FIELD_NUMBER: _ClassVar[int]
    RECORDS_READ_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    hello: Hello
    ready: Ready
    key_value: KeyValue
    joined_ring: JoinedRing
    stepped: Stepped
    epoch_ended: EpochEnded
    heartbeat: Heartbeat
    left_ring: LeftRing
    leaving: Leaving
    failed: Failed
    finished: Finished
    resume: Resume
    saved: Saved
    warned: Warned
    bad_records: BadRecords
    addresses: Addresses
    checkpoint_part: CheckpointPart
    checkpoint_failed: CheckpointFailed
    checkpointed: Checkpointed
    evaluated: Evaluated
    history: History
    warm_started: WarmStarted
    built: Built
    rows_lost: RowsLost
    records_read: RecordsRead
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., key_value: _Optional[_Union[KeyValue, _Mapping]] = ..., joined_ring: _Optional[_Union[JoinedRing, _Mapping]] = ..., stepped: _Optional[_Union[Stepped, _Mapping]] = ..., epoch_ended: _Optional[_Union[EpochEnded, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., left_ring: _Optional[_Union[LeftRing, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., warned: _Optional[_Union[Warned, _Mapping]] = ..., bad_records: _Optional[_Union[BadRecords, _Mapping]] = ..., addresses: _Optional[_Union[Addresses, _Mapping]] = ..., checkpoint_part: _Optional[_Union[CheckpointPart, _Mapping]] = ..., checkpoint_failed: _Optional[_Union[CheckpointFailed, _Mapping]] = ..., checkpointed: _Optional[_Union[Checkpointed, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., history: _Optional[_Union[History, _Mapping]] = ..., warm_started: _Optional[_Union[WarmStarted, _Mapping]] = ..., built: _Optional[_Union[Built, _Mapping]] = ..., rows_lost: _Optional[_Union[RowsLost, _Mapping]] = ..., records_read: _Optional[_Union[RecordsRead, _Mapping]] = ...) -> None: ...

class RecordsRead(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker", "version", "resumes", "term", "predecessor", "pid")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker: int
    version: str
    resumes: bool
    term: int
    predecessor: Predecessor
    pid: int
    def __init__(self, worker: _Optional[int] = ..., version: _Optional[str] = ..., resumes: _Optional[bool] = ..., term: _Optional[int] = ..., predecessor: _Optional[_Union[Predecessor, _Mapping]] = ..., pid: _Optional[int] = ...) -> None: ...

class Predecessor(_message.Message):
    __slots__ = ("place", "signal", "code", "why")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    place: int
    signal: str
    code: int
    why: str
    def __init__(self, place: _Optional[int] = ..., signal: _Optional[str] = ..., code: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("layout", "members", "joined", "left", "left_ring", "model", "held_out", "forced", "tables", "sample_loss", "leaving", "digests")
    class HeldOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LEFT_RING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_LOSS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    members: _containers.RepeatedScalarFieldContainer[int]
    joined: bool
    left: bool
    left_ring: LeftRing
    model: str
    held_out: _containers.ScalarMap[str, int]
    forced: _containers.RepeatedScalarFieldContainer[str]
    tables: int
    sample_loss: SampleLoss
    leaving: str
    digests: _containers.ScalarMap[str, str]
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., members: _Optional[_Iterable[int]] = ..., joined: _Optional[bool] = ..., left: _Optional[bool] = ..., left_ring: _Optional[_Union[LeftRing, _Mapping]] = ..., model: _Optional[str] = ..., held_out: _Optional[_Mapping[str, int]] = ..., forced: _Optional[_Iterable[str]] = ..., tables: _Optional[int] = ..., sample_loss: _Optional[_Union[SampleLoss, _Mapping]] = ..., leaving: _Optional[str] = ..., digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Built(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: int
    def __init__(self, tables: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("layout", "model", "checkpoint", "held_out", "forced", "tables", "sample_loss", "digests")
    class HeldOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class DigestsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_LOSS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    model: str
    checkpoint: int
    held_out: _containers.ScalarMap[str, int]
    forced: _containers.RepeatedScalarFieldContainer[str]
    tables: int
    sample_loss: SampleLoss
    digests: _containers.ScalarMap[str, str]
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., model: _Optional[str] = ..., checkpoint: _Optional[int] = ..., held_out: _Optional[_Mapping[str, int]] = ..., forced: _Optional[_Iterable[str]] = ..., tables: _Optional[int] = ..., sample_loss: _Optional[_Union[SampleLoss, _Mapping]] = ..., digests: _Optional[_Mapping[str, str]] = ...) -> None: ...

class SampleLoss(_message.Message):
    __slots__ = ("loss", "tolerance")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    loss: float
    tolerance: float
    def __init__(self, loss: _Optional[float] = ..., tolerance: _Optional[float] = ...) -> None: ...

class Addresses(_message.Message):
    __slots__ = ("scope", "alike", "at", "differ")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    ALIKE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DIFFER_FIELD_NUMBER: _ClassVar[int]
    scope: str
    alike: bytes
    at: _containers.RepeatedScalarFieldContainer[int]
    differ: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, scope: _Optional[str] = ..., alike: _Optional[bytes] = ..., at: _Optional[_Iterable[int]] = ..., differ: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KeyValue(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class JoinedRing(_message.Message):
    __slots__ = ("step", "round", "callbacks_done", "rolled_back", "servers", "out", "stay")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CALLBACKS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    step: int
    round: int
    callbacks_done: int
    rolled_back: str
    servers: int
    out: _containers.RepeatedScalarFieldContainer[int]
    stay: str
    def __init__(self, step: _Optional[int] = ..., round: _Optional[int] = ..., callbacks_done: _Optional[int] = ..., rolled_back: _Optional[str] = ..., servers: _Optional[int] = ..., out: _Optional[_Iterable[int]] = ..., stay: _Optional[str] = ...) -> None: ...

class Stepped(_message.Message):
    __slots__ = ("step", "stall_seconds", "redone_records", "wasted_seconds")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REDONE_RECORDS_FIELD_NUMBER: _ClassVar[int]
    WASTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    stall_seconds: float
    redone_records: int
    wasted_seconds: float
    def __init__(self, step: _Optional[int] = ..., stall_seconds: _Optional[float] = ..., redone_records: _Optional[int] = ..., wasted_seconds: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("step", "rate", "loss", "memory", "epoch_loss", "speed", "round", "staleness", "waits", "gpu", "activity")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_LOSS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    step: int
    rate: float
    loss: float
    memory: int
    epoch_loss: EpochLoss
    speed: float
    round: int
    staleness: Staleness
    waits: ServerWait
    gpu: Gpu
    activity: Activity
    def __init__(self, step: _Optional[int] = ..., rate: _Optional[float] = ..., loss: _Optional[float] = ..., memory: _Optional[int] = ..., epoch_loss: _Optional[_Union[EpochLoss, _Mapping]] = ..., speed: _Optional[float] = ..., round: _Optional[int] = ..., staleness: _Optional[_Union[Staleness, _Mapping]] = ..., waits: _Optional[_Union[ServerWait, _Mapping]] = ..., gpu: _Optional[_Union[Gpu, _Mapping]] = ..., activity: _Optional[_Union[Activity, _Mapping]] = ...) -> None: ...

class Activity(_message.Message):
    __slots__ = ("what", "seconds")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    what: str
    seconds: float
    def __init__(self, what: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("name", "memory", "memory_limit", "busy")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    name: str
    memory: int
    memory_limit: int
    busy: float
    def __init__(self, name: _Optional[str] = ..., memory: _Optional[int] = ..., memory_limit: _Optional[int] = ..., busy: _Optional[float] = ...) -> None: ...

class Staleness(_message.Message):
    __slots__ = ("steps", "median", "most", "repeated")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    median: float
    most: int
    repeated: int
    def __init__(self, steps: _Optional[int] = ..., median: _Optional[float] = ..., most: _Optional[int] = ..., repeated: _Optional[int] = ...) -> None: ...

class ServerWait(_message.Message):
    __slots__ = ("server", "call", "seconds", "why")
    SERVER_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    server: int
    call: str
    seconds: float
    why: str
    def __init__(self, server: _Optional[int] = ..., call: _Optional[str] = ..., seconds: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class EpochLoss(_message.Message):
    __slots__ = ("epoch", "records", "mean")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    records: int
    mean: float
    def __init__(self, epoch: _Optional[int] = ..., records: _Optional[int] = ..., mean: _Optional[float] = ...) -> None: ...

class EpochEnded(_message.Message):
    __slots__ = ("epochs", "loss", "metrics", "sha256")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    epochs: int
    loss: EpochLoss
    metrics: _containers.ScalarMap[str, float]
    sha256: str
    def __init__(self, epochs: _Optional[int] = ..., loss: _Optional[_Union[EpochLoss, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., sha256: _Optional[str] = ...) -> None: ...

class LeftRing(_message.Message):
    __slots__ = ("step", "has_state", "skipped", "broken", "digest", "bad", "round", "callbacks_done", "stop", "stopped_by", "made_in", "reads")
    class BadEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    HAS_STATE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CALLBACKS_DONE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOPPED_BY_FIELD_NUMBER: _ClassVar[int]
    MADE_IN_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    step: int
    has_state: bool
    skipped: _containers.RepeatedCompositeFieldContainer[Range]
    broken: str
    digest: str
    bad: _containers.ScalarMap[int, int]
    round: int
    callbacks_done: int
    stop: int
    stopped_by: str
    made_in: int
    reads: bool
    def __init__(self, step: _Optional[int] = ..., has_state: _Optional[bool] = ..., skipped: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., broken: _Optional[str] = ..., digest: _Optional[str] = ..., bad: _Optional[_Mapping[int, int]] = ..., round: _Optional[int] = ..., callbacks_done: _Optional[int] = ..., stop: _Optional[int] = ..., stopped_by: _Optional[str] = ..., made_in: _Optional[int] = ..., reads: _Optional[bool] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("step", "split", "records", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    split: str
    records: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., split: _Optional[str] = ..., records: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class History(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class BadRecords(_message.Message):
    __slots__ = ("epoch", "records")
    class RecordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    records: _containers.ScalarMap[int, str]
    def __init__(self, epoch: _Optional[int] = ..., records: _Optional[_Mapping[int, str]] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("why", "traceback", "fatal", "mistake", "no_gpu_memory")
    WHY_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    FATAL_FIELD_NUMBER: _ClassVar[int]
    MISTAKE_FIELD_NUMBER: _ClassVar[int]
    NO_GPU_MEMORY_FIELD_NUMBER: _ClassVar[int]
    why: str
    traceback: str
    fatal: bool
    mistake: bool
    no_gpu_memory: bool
    def __init__(self, why: _Optional[str] = ..., traceback: _Optional[str] = ..., fatal: _Optional[bool] = ..., mistake: _Optional[bool] = ..., no_gpu_memory: _Optional[bool] = ...) -> None: ...

class PartFailed(_message.Message):
    __slots__ = ("part", "why", "traceback")
    PART_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    part: str
    why: str
    traceback: str
    def __init__(self, part: _Optional[str] = ..., why: _Optional[str] = ..., traceback: _Optional[str] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("model", "note", "failed", "step", "variables")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    model: str
    note: str
    failed: _containers.RepeatedCompositeFieldContainer[PartFailed]
    step: int
    variables: str
    def __init__(self, model: _Optional[str] = ..., note: _Optional[str] = ..., failed: _Optional[_Iterable[_Union[PartFailed, _Mapping]]] = ..., step: _Optional[int] = ..., variables: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("metrics", "model", "note", "failed", "exports", "list_sha256")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ExportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    EXPORTS_FIELD_NUMBER: _ClassVar[int]
    LIST_SHA256_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    model: str
    note: str
    failed: _containers.RepeatedCompositeFieldContainer[PartFailed]
    exports: _containers.ScalarMap[str, str]
    list_sha256: bytes
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., model: _Optional[str] = ..., note: _Optional[str] = ..., failed: _Optional[_Iterable[_Union[PartFailed, _Mapping]]] = ..., exports: _Optional[_Mapping[str, str]] = ..., list_sha256: _Optional[bytes] = ...) -> None: ...

class RowsLost(_message.Message):
    __slots__ = ("why", "trained_on")
    WHY_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ON_FIELD_NUMBER: _ClassVar[int]
    why: str
    trained_on: bool
    def __init__(self, why: _Optional[str] = ..., trained_on: _Optional[bool] = ...) -> None: ...

class CheckpointPart(_message.Message):
    __slots__ = ("step", "attempt", "index", "of", "name", "nbytes", "sha256", "state")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: str
    index: int
    of: int
    name: str
    nbytes: int
    sha256: bytes
    state: bytes
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[str] = ..., index: _Optional[int] = ..., of: _Optional[int] = ..., name: _Optional[str] = ..., nbytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., state: _Optional[bytes] = ...) -> None: ...

class CheckpointFailed(_message.Message):
    __slots__ = ("step", "attempt", "why")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: str
    why: str
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class Checkpointed(_message.Message):
    __slots__ = ("step", "attempt", "nbytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: str
    nbytes: int
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[str] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Warned(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class WarmStarted(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class ToWorker(_message.Message):
    __slots__ = ("run_id", "generation", "term", "welcome", "form", "key_value", "leave", "cut", "train", "export", "stop", "ack", "addresses", "active_master", "checkpoint", "commit_checkpoint", "write_checkpoint")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    KEY_VALUE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_MASTER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    WRITE_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    term: int
    welcome: Welcome
    form: Form
    key_value: KeyValue
    leave: Leave
    cut: Cut
    train: Train
    export: Export
    stop: Stop
    ack: Ack
    addresses: Addresses
    active_master: ActiveMaster
    checkpoint: Checkpoint
    commit_checkpoint: CommitCheckpoint
    write_checkpoint: WriteCheckpoint
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., term: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., form: _Optional[_Union[Form, _Mapping]] = ..., key_value: _Optional[_Union[KeyValue, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., cut: _Optional[_Union[Cut, _Mapping]] = ..., train: _Optional[_Union[Train, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., addresses: _Optional[_Union[Addresses, _Mapping]] = ..., active_master: _Optional[_Union[ActiveMaster, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., commit_checkpoint: _Optional[_Union[CommitCheckpoint, _Mapping]] = ..., write_checkpoint: _Optional[_Union[WriteCheckpoint, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("config", "output", "worker", "master_outage_timeout_seconds", "salvage", "preflight", "servers")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MASTER_OUTAGE_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SALVAGE_FIELD_NUMBER: _ClassVar[int]
    PREFLIGHT_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    config: str
    output: str
    worker: int
    master_outage_timeout_seconds: float
    salvage: str
    preflight: bool
    servers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, config: _Optional[str] = ..., output: _Optional[str] = ..., worker: _Optional[int] = ..., master_outage_timeout_seconds: _Optional[float] = ..., salvage: _Optional[str] = ..., preflight: _Optional[bool] = ..., servers: _Optional[_Iterable[str]] = ...) -> None: ...

class Form(_message.Message):
    __slots__ = ("members", "root", "sync", "epochs", "shares", "layout", "step", "joining", "round", "callbacks_done", "servers", "addresses", "untrusted_up_to", "untrusted_reason", "released_from")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CALLBACKS_DONE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    UNTRUSTED_UP_TO_FIELD_NUMBER: _ClassVar[int]
    UNTRUSTED_REASON_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FROM_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedScalarFieldContainer[int]
    root: int
    sync: bool
    epochs: int
    shares: _containers.RepeatedScalarFieldContainer[int]
    layout: Layout
    step: int
    joining: _containers.RepeatedScalarFieldContainer[int]
    round: int
    callbacks_done: int
    servers: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    untrusted_up_to: int
    untrusted_reason: str
    released_from: int
    def __init__(self, members: _Optional[_Iterable[int]] = ..., root: _Optional[int] = ..., sync: _Optional[bool] = ..., epochs: _Optional[int] = ..., shares: _Optional[_Iterable[int]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., step: _Optional[int] = ..., joining: _Optional[_Iterable[int]] = ..., round: _Optional[int] = ..., callbacks_done: _Optional[int] = ..., servers: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., untrusted_up_to: _Optional[int] = ..., untrusted_reason: _Optional[str] = ..., released_from: _Optional[int] = ...) -> None: ...

class Train(_message.Message):
    __slots__ = ("epochs",)
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    epochs: int
    def __init__(self, epochs: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cut(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Export(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitCheckpoint(_message.Message):
    __slots__ = ("step", "attempt", "parts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: str
    parts: _containers.RepeatedCompositeFieldContainer[CheckpointPart]
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[CheckpointPart, _Mapping]]] = ...) -> None: ...

class WriteCheckpoint(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActiveMaster(_message.Message):
    __slots__ = ("term", "standbys")
    TERM_FIELD_NUMBER: _ClassVar[int]
    STANDBYS_FIELD_NUMBER: _ClassVar[int]
    term: int
    standbys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, term: _Optional[int] = ..., standbys: _Optional[_Iterable[str]] = ...) -> None: ...

class MasterReport(_message.Message):
    __slots__ = ("worker", "term", "lost")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    worker: int
    term: int
    lost: bool
    def __init__(self, worker: _Optional[int] = ..., term: _Optional[int] = ..., lost: _Optional[bool] = ...) -> None: ...

class LeaseRenewal(_message.Message):
    __slots__ = ("term",)
    TERM_FIELD_NUMBER: _ClassVar[int]
    term: int
    def __init__(self, term: _Optional[int] = ...) -> None: ...

class LeaseConfirmation(_message.Message):
    __slots__ = ("yes",)
    YES_FIELD_NUMBER: _ClassVar[int]
    yes: bool
    def __init__(self, yes: _Optional[bool] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("follow",)
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    def __init__(self, follow: _Optional[bool] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("workers", "servers")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    workers: int
    servers: int
    def __init__(self, workers: _Optional[int] = ..., servers: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("why", "checkpoint", "force", "id")
    WHY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    why: str
    checkpoint: bool
    force: bool
    id: str
    def __init__(self, why: _Optional[str] = ..., checkpoint: _Optional[bool] = ..., force: _Optional[bool] = ..., id: _Optional[str] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Reply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
