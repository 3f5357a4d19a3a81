from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FileName(_message.Message):
    __slots__ = ("place", "directory", "name")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    place: str
    directory: str
    name: str
    def __init__(self, place: _Optional[str] = ..., directory: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ListFiles(_message.Message):
    __slots__ = ("of", "prefix")
    OF_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    of: FileName
    prefix: str
    def __init__(self, of: _Optional[_Union[FileName, _Mapping]] = ..., prefix: _Optional[str] = ...) -> None: ...

class FilesListed(_message.Message):
    __slots__ = ("directories",)
    class Directory(_message.Message):
        __slots__ = ("name", "bytes")
        class BytesEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        NAME_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        name: str
        bytes: _containers.ScalarMap[str, int]
        def __init__(self, name: _Optional[str] = ..., bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...
    DIRECTORIES_FIELD_NUMBER: _ClassVar[int]
    directories: _containers.RepeatedCompositeFieldContainer[FilesListed.Directory]
    def __init__(self, directories: _Optional[_Iterable[_Union[FilesListed.Directory, _Mapping]]] = ...) -> None: ...

class FilePiece(_message.Message):
    __slots__ = ("file", "data", "last", "nbytes")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    file: FileName
    data: bytes
    last: bool
    nbytes: int
    def __init__(self, file: _Optional[_Union[FileName, _Mapping]] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., nbytes: _Optional[int] = ...) -> None: ...

class NewFile(_message.Message):
    __slots__ = ("file", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: FileName
    data: bytes
    def __init__(self, file: _Optional[_Union[FileName, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FileCreated(_message.Message):
    __slots__ = ("created",)
    CREATED_FIELD_NUMBER: _ClassVar[int]
    created: bool
    def __init__(self, created: _Optional[bool] = ...) -> None: ...

class RenameFile(_message.Message):
    __slots__ = ("file", "other")
    FILE_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    file: FileName
    other: str
    def __init__(self, file: _Optional[_Union[FileName, _Mapping]] = ..., other: _Optional[str] = ...) -> None: ...

class RemoveFiles(_message.Message):
    __slots__ = ("of", "names")
    OF_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    of: FileName
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, of: _Optional[_Union[FileName, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class FileDone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
