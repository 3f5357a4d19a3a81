from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rows(_message.Message):
    __slots__ = ("tensor", "ids")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    tensor: bytes
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tensor: _Optional[bytes] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("version", "dense", "tables")
    class DenseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Rows
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Rows, _Mapping]] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    version: int
    dense: _containers.ScalarMap[str, bytes]
    tables: _containers.MessageMap[str, Rows]
    def __init__(self, version: _Optional[int] = ..., dense: _Optional[_Mapping[str, bytes]] = ..., tables: _Optional[_Mapping[str, Rows]] = ...) -> None: ...
