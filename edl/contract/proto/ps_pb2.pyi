from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tables(_message.Message):
    __slots__ = ("run_id", "seed", "tables")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    seed: int
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    def __init__(self, run_id: _Optional[str] = ..., seed: _Optional[int] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ...) -> None: ...

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

class SettleRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "attempt")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    attempt: str
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., attempt: _Optional[str] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "ids")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    ids: _containers.RepeatedCompositeFieldContainer[Ids]
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., ids: _Optional[_Iterable[_Union[Ids, _Mapping]]] = ...) -> None: ...

class Ids(_message.Message):
    __slots__ = ("table", "ids")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: bytes
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "table", "after", "most", "since")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    table: int
    after: int
    most: int
    since: int
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., table: _Optional[int] = ..., after: _Optional[int] = ..., most: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class Listed(_message.Message):
    __slots__ = ("ids", "rows", "more", "step", "line")
    IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    rows: bytes
    more: bool
    step: int
    line: str
    def __init__(self, ids: _Optional[bytes] = ..., rows: _Optional[bytes] = ..., more: _Optional[bool] = ..., step: _Optional[int] = ..., line: _Optional[str] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "rank", "gradients")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    rank: int
    gradients: _containers.RepeatedCompositeFieldContainer[Gradients]
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ..., gradients: _Optional[_Iterable[_Union[Gradients, _Mapping]]] = ...) -> None: ...

class Gradients(_message.Message):
    __slots__ = ("table", "ids", "values")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    table: int
    ids: bytes
    values: bytes
    def __init__(self, table: _Optional[int] = ..., ids: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class WritePartRequest(_message.Message):
    __slots__ = ("run_id", "generation", "step", "last", "attempt", "index", "of")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    generation: int
    step: int
    last: Commit
    attempt: str
    index: int
    of: int
    def __init__(self, run_id: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., last: _Optional[_Union[Commit, _Mapping]] = ..., attempt: _Optional[str] = ..., index: _Optional[int] = ..., of: _Optional[int] = ...) -> None: ...

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

class Position(_message.Message):
    __slots__ = ("generation", "step", "empty")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    empty: bool
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., empty: _Optional[bool] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("position", "tables", "memory", "memory_limit", "rows_pulled", "rows_staged", "busy_seconds", "log_bytes", "run_id", "index", "servers", "line")
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
    LINE_FIELD_NUMBER: _ClassVar[int]
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
    line: str
    def __init__(self, position: _Optional[_Union[Position, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[TableState, _Mapping]]] = ..., memory: _Optional[int] = ..., memory_limit: _Optional[int] = ..., rows_pulled: _Optional[int] = ..., rows_staged: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., log_bytes: _Optional[int] = ..., run_id: _Optional[str] = ..., index: _Optional[int] = ..., servers: _Optional[int] = ..., line: _Optional[str] = ...) -> None: ...

class TableState(_message.Message):
    __slots__ = ("name", "rows", "dim")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    name: str
    rows: int
    dim: int
    def __init__(self, name: _Optional[str] = ..., rows: _Optional[int] = ..., dim: _Optional[int] = ...) -> None: ...
