from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class AttendRequest(_message.Message):
    __slots__ = ("protocol", "ordinal", "world_size")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    ordinal: int
    world_size: int
    def __init__(self, protocol: _Optional[int] = ..., ordinal: _Optional[int] = ..., world_size: _Optional[int] = ...) -> None: ...

class AttendReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RendezvousRequest(_message.Message):
    __slots__ = ("tag", "payload", "ordinal", "replicas", "timeout_s")
    TAG_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    tag: str
    payload: bytes
    ordinal: int
    replicas: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, tag: _Optional[str] = ..., payload: _Optional[bytes] = ..., ordinal: _Optional[int] = ..., replicas: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class RendezvousReply(_message.Message):
    __slots__ = ("payload", "ends")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    ends: bool
    def __init__(self, payload: _Optional[bytes] = ..., ends: bool = ...) -> None: ...

class GoodbyeRequest(_message.Message):
    __slots__ = ("ordinal",)
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    ordinal: int
    def __init__(self, ordinal: _Optional[int] = ...) -> None: ...

class GoodbyeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConfigRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class ConfigReply(_message.Message):
    __slots__ = ("workers", "coordinator")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    workers: str
    coordinator: str
    def __init__(self, workers: _Optional[str] = ..., coordinator: _Optional[str] = ...) -> None: ...
