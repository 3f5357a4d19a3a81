from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Ask(_message.Message):
    __slots__ = ("number", "method", "request")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    method: str
    request: bytes
    def __init__(self, number: _Optional[int] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("number", "code", "why", "answer")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: int
    why: str
    answer: bytes
    def __init__(self, number: _Optional[int] = ..., code: _Optional[int] = ..., why: _Optional[str] = ..., answer: _Optional[bytes] = ...) -> None: ...

class Tables(_message.Message):
    __slots__ = ("run_id", "seed", "tables", "asynchronous")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    ASYNCHRONOUS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seed: int
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    asynchronous: Asynchronous
    def __init__(self, run_id: _Optional[str] = ..., seed: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., asynchronous: _Optional[_Union[Asynchronous, _Mapping]] = ...) -> None: ...

class Asynchronous(_message.Message):
    __slots__ = ("grads_to_wait", "max_staleness", "scale_rate")
    GRADS_TO_WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    SCALE_RATE_FIELD_NUMBER: _ClassVar[int]
    grads_to_wait: int
    max_staleness: int
    scale_rate: bool
    def __init__(self, grads_to_wait: _Optional[int] = ..., max_staleness: _Optional[int] = ..., scale_rate: _Optional[bool] = ...) -> None: ...

class Table(_message.Message):
    __slots__ = ("name", "dim", "initializer", "optimizer", "own_learning_rate", "min_count", "ttl_steps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    OWN_LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TTL_STEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dim: int
    initializer: str
    optimizer: str
    own_learning_rate: bool
    min_count: int
    ttl_steps: int
    def __init__(self, name: _Optional[str] = ..., dim: _Optional[int] = ..., initializer: _Optional[str] = ..., optimizer: _Optional[str] = ..., own_learning_rate: _Optional[bool] = ..., min_count: _Optional[int] = ..., ttl_steps: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("step", "skipped", "scale", "learning_rate", "iteration")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    step: int
    skipped: bool
    scale: float
    learning_rate: float
    iteration: int
    def __init__(self, step: _Optional[int] = ..., skipped: _Optional[bool] = ..., scale: _Optional[float] = ..., learning_rate: _Optional[float] = ..., iteration: _Optional[int] = ...) -> None: ...

class StartGenerationRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "assignment")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    assignment: ShardAssignment
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "attempt", "assignment", "start")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    attempt: str
    assignment: ShardAssignment
    start: Start
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[str] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("directory", "step", "attempt", "everything", "tables")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    directory: str
    step: int
    attempt: str
    everything: bool
    tables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, directory: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[str] = ..., everything: _Optional[bool] = ..., tables: _Optional[_Iterable[str]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "ids", "servers", "assignment")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    ids: _containers.RepeatedCompositeFieldContainer[Ids]
    servers: int
    assignment: ShardAssignment
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., ids: _Optional[_Iterable[_Union[Ids, _Mapping]]] = ..., servers: _Optional[int] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ...) -> None: ...

class Ids(_message.Message):
    __slots__ = ("table", "ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: bytes
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("rows", "version")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    version: int
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ..., version: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "table", "after", "most", "since", "servers", "assignment")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    table: int
    after: int
    most: int
    since: int
    servers: int
    assignment: ShardAssignment
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., table: _Optional[int] = ..., after: _Optional[int] = ..., most: _Optional[int] = ..., since: _Optional[int] = ..., servers: _Optional[int] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ...) -> None: ...

class Listed(_message.Message):
    __slots__ = ("ids", "rows", "more", "step", "incarnation")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    rows: bytes
    more: bool
    step: int
    incarnation: str
    def __init__(self, ids: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., more: _Optional[bool] = ..., step: _Optional[int] = ..., incarnation: _Optional[str] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("run_id", "step", "gradients", "generation", "rank", "incarnation", "worker", "version", "learning_rate", "loss", "records", "skipped")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    gradients: _containers.RepeatedCompositeFieldContainer[Gradients]
    generation: int
    rank: int
    incarnation: str
    worker: int
    version: int
    learning_rate: float
    loss: float
    records: int
    skipped: bool
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., gradients: _Optional[_Iterable[_Union[Gradients, _Mapping]]] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[str] = ..., worker: _Optional[int] = ..., version: _Optional[int] = ..., learning_rate: _Optional[float] = ..., loss: _Optional[float] = ..., records: _Optional[int] = ..., skipped: _Optional[bool] = ...) -> None: ...

class Gradients(_message.Message):
    __slots__ = ("table", "ids", "values")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: bytes
    values: bytes
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class ShardAssignment(_message.Message):
    __slots__ = ("servers", "replicas", "out")
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    servers: int
    replicas: int
    out: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, servers: _Optional[int] = ..., replicas: _Optional[int] = ..., out: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "of", "to", "addresses", "steps", "version", "kept")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    of: ShardAssignment
    to: ShardAssignment
    addresses: _containers.RepeatedScalarFieldContainer[str]
    steps: Steps
    version: int
    kept: KeepRequest
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., of: _Optional[_Union[ShardAssignment, _Mapping]] = ..., to: _Optional[_Union[ShardAssignment, _Mapping]] = ..., addresses: _Optional[_Iterable[str]] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ..., version: _Optional[int] = ..., kept: _Optional[_Union[KeepRequest, _Mapping]] = ...) -> None: ...

class PageRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "of", "to", "index", "table", "bucket", "most")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    of: ShardAssignment
    to: ShardAssignment
    index: int
    table: int
    bucket: int
    most: int
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., of: _Optional[_Union[ShardAssignment, _Mapping]] = ..., to: _Optional[_Union[ShardAssignment, _Mapping]] = ..., index: _Optional[int] = ..., table: _Optional[int] = ..., bucket: _Optional[int] = ..., most: _Optional[int] = ...) -> None: ...

class PageOfRows(_message.Message):
    __slots__ = ("table", "ids", "steps", "counts", "rows", "slots", "seen", "next")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: bytes
    steps: bytes
    counts: bytes
    rows: bytes
    slots: bytes
    seen: bytes
    next: int
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[bytes] = ..., steps: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., seen: _Optional[bytes] = ..., next: _Optional[int] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "to", "since", "fetched")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    to: ShardAssignment
    since: int
    fetched: int
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., to: _Optional[_Union[ShardAssignment, _Mapping]] = ..., since: _Optional[int] = ..., fetched: _Optional[int] = ...) -> None: ...

class WritePartRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "attempt", "index", "of", "assignment")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    attempt: str
    index: int
    of: int
    assignment: ShardAssignment
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., attempt: _Optional[str] = ..., index: _Optional[int] = ..., of: _Optional[int] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ("name", "nbytes", "sha256", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    nbytes: int
    sha256: bytes
    why: str
    def __init__(self, name: _Optional[str] = ..., nbytes: _Optional[int] = ..., sha256: _Optional[bytes] = ..., why: _Optional[str] = ...) -> None: ...

class CommittedRequest(_message.Message):
    __slots__ = ("run_id", "step", "attempt")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    attempt: str
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ..., attempt: _Optional[str] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("run_id", "values", "generation", "assignment", "since", "start", "attempt", "page", "more")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    values: _containers.RepeatedCompositeFieldContainer[Gradients]
    generation: int
    assignment: ShardAssignment
    since: int
    start: Start
    attempt: str
    page: int
    more: bool
    def __init__(self, run_id: _Optional[str] = ..., values: _Optional[_Iterable[_Union[Gradients, _Mapping]]] = ..., generation: _Optional[int] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ..., since: _Optional[int] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., attempt: _Optional[str] = ..., page: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("bounds",)
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, bounds: _Optional[_Iterable[int]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("version", "step", "incarnation", "empty", "accepted", "loss", "records", "refused", "repeated")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    incarnation: str
    empty: bool
    accepted: int
    loss: float
    records: int
    refused: bool
    repeated: int
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ..., incarnation: _Optional[str] = ..., empty: _Optional[bool] = ..., accepted: _Optional[int] = ..., loss: _Optional[float] = ..., records: _Optional[int] = ..., refused: _Optional[bool] = ..., repeated: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "worker", "most", "limit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    worker: int
    most: int
    limit: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., worker: _Optional[int] = ..., most: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class LeasedSteps(_message.Message):
    __slots__ = ("steps", "progress")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    steps: Steps
    progress: Progress
    def __init__(self, steps: _Optional[_Union[Steps, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class RescheduleRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "steps", "server", "server_incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    SERVER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    steps: Steps
    server: int
    server_incarnation: str
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ..., server: _Optional[int] = ..., server_incarnation: _Optional[str] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("run_id", "incarnation", "step", "order", "ledger", "repeated")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: str
    step: int
    order: int
    ledger: bytes
    repeated: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., step: _Optional[int] = ..., order: _Optional[int] = ..., ledger: _Optional[bytes] = ..., repeated: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("generation", "step", "empty", "assignment", "ready", "ready_step", "assigned_in", "fetched", "fetched_in")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    READY_STEP_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_IN_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_IN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    empty: bool
    assignment: ShardAssignment
    ready: ShardAssignment
    ready_step: int
    assigned_in: int
    fetched: ShardAssignment
    fetched_in: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., empty: _Optional[bool] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ..., ready: _Optional[_Union[ShardAssignment, _Mapping]] = ..., ready_step: _Optional[int] = ..., assigned_in: _Optional[int] = ..., fetched: _Optional[_Union[ShardAssignment, _Mapping]] = ..., fetched_in: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("kept",)
    KEPT_FIELD_NUMBER: _ClassVar[int]
    kept: bool
    def __init__(self, kept: _Optional[bool] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("position", "tables", "memory", "memory_limit", "rows_pulled", "rows_staged", "busy_seconds", "log_bytes", "run_id", "index", "servers", "incarnation", "accepted", "rescheduled", "assignment", "version", "waiting", "kept")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_FIELD_NUMBER: _ClassVar[int]
    ROWS_PULLED_FIELD_NUMBER: _ClassVar[int]
    ROWS_STAGED_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RESCHEDULED_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    position: Position
    tables: _containers.RepeatedCompositeFieldContainer[TableState]
    memory: int
    memory_limit: int
    rows_pulled: int
    rows_staged: int
    busy_seconds: float
    log_bytes: int
    run_id: str
    index: int
    servers: int
    incarnation: str
    accepted: Steps
    rescheduled: Steps
    assignment: ShardAssignment
    version: int
    waiting: int
    kept: KeepRequest
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ..., memory: _Optional[int] = ..., memory_limit: _Optional[int] = ..., rows_pulled: _Optional[int] = ..., rows_staged: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., log_bytes: _Optional[int] = ..., run_id: _Optional[str] = ..., index: _Optional[int] = ..., servers: _Optional[int] = ..., incarnation: _Optional[str] = ..., accepted: _Optional[_Union[Steps, _Mapping]] = ..., rescheduled: _Optional[_Union[Steps, _Mapping]] = ..., assignment: _Optional[_Union[ShardAssignment, _Mapping]] = ..., version: _Optional[int] = ..., waiting: _Optional[int] = ..., kept: _Optional[_Union[KeepRequest, _Mapping]] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Probed(_message.Message):
    __slots__ = ("done", "waiting")
    DONE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    done: int
    waiting: int
    def __init__(self, done: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class TableState(_message.Message):
    __slots__ = ("name", "rows", "dim")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    dim: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., dim: _Optional[int] = ...) -> None: ...
