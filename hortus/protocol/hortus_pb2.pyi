from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("version", "info", "fingerprint", "files", "max_message_bytes", "draining", "stream_socket")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STREAM_SOCKET_FIELD_NUMBER: _ClassVar[int]
    version: int
    info: bytes
    fingerprint: str
    files: _containers.RepeatedCompositeFieldContainer[File]
    max_message_bytes: int
    draining: bool
    stream_socket: str
    def __init__(self, version: _Optional[int] = ..., info: _Optional[bytes] = ..., fingerprint: _Optional[str] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., max_message_bytes: _Optional[int] = ..., draining: _Optional[bool] = ..., stream_socket: _Optional[str] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("path", "size", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    sha256: str
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Asks(_message.Message):
    __slots__ = ("numbers", "counts", "deadlines_ms", "lengths", "ids", "token_types", "cancelled", "span_counts", "spans", "ping", "traces")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINES_MS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TYPES_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    SPAN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    counts: bytes
    deadlines_ms: bytes
    lengths: bytes
    ids: bytes
    token_types: bytes
    cancelled: bytes
    span_counts: bytes
    spans: bytes
    ping: int
    traces: bytes
    def __init__(self, numbers: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., deadlines_ms: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., token_types: _Optional[bytes] = ..., cancelled: _Optional[bytes] = ..., span_counts: _Optional[bytes] = ..., spans: _Optional[bytes] = ..., ping: _Optional[int] = ..., traces: _Optional[bytes] = ...) -> None: ...

class Replies(_message.Message):
    __slots__ = ("numbers", "counts", "queue_ms", "device_ms", "width", "rows", "failures", "pong", "draining")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    numbers: bytes
    counts: bytes
    queue_ms: bytes
    device_ms: bytes
    width: int
    rows: bytes
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    pong: int
    draining: bool
    def __init__(self, numbers: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., queue_ms: _Optional[bytes] = ..., device_ms: _Optional[bytes] = ..., width: _Optional[int] = ..., rows: _Optional[bytes] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., pong: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("number", "code", "message", "param", "retry_after_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: str
    message: str
    param: str
    retry_after_s: float
    def __init__(self, number: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...
