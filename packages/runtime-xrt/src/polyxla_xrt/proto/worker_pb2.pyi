from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "workers", "worker")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    workers: str
    worker: int
    def __init__(self, protocol: _Optional[int] = ..., workers: _Optional[str] = ..., worker: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Account(_message.Message):
    __slots__ = ("worker", "job", "heartbeats", "is_full", "retired")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    HEARTBEATS_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    job: str
    heartbeats: int
    is_full: bool
    retired: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker: _Optional[int] = ..., job: _Optional[str] = ..., heartbeats: _Optional[int] = ..., is_full: bool = ..., retired: _Optional[_Iterable[int]] = ...) -> None: ...

class Accounts(_message.Message):
    __slots__ = ("accounts",)
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    accounts: _containers.RepeatedCompositeFieldContainer[Account]
    def __init__(self, accounts: _Optional[_Iterable[_Union[Account, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("host", "pid", "user", "command")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    host: str
    pid: int
    user: str
    command: str
    def __init__(self, host: _Optional[str] = ..., pid: _Optional[int] = ..., user: _Optional[str] = ..., command: _Optional[str] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("protocol", "holder", "cores", "wait_s", "stall_timeout_s", "workers", "worker", "host", "coordinator", "secret", "job", "resumable", "owner")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    STALL_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    holder: Holder
    cores: int
    wait_s: float
    stall_timeout_s: float
    workers: int
    worker: int
    host: str
    coordinator: str
    secret: str
    job: str
    resumable: bool
    owner: str
    def __init__(self, protocol: _Optional[int] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., cores: _Optional[int] = ..., wait_s: _Optional[float] = ..., stall_timeout_s: _Optional[float] = ..., workers: _Optional[int] = ..., worker: _Optional[int] = ..., host: _Optional[str] = ..., coordinator: _Optional[str] = ..., secret: _Optional[str] = ..., job: _Optional[str] = ..., resumable: bool = ..., owner: _Optional[str] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("held", "granted", "moved")
    HELD_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    held: Held
    granted: Granted
    moved: Moved
    def __init__(self, held: _Optional[_Union[Held, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    def __init__(self, jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("holder", "since", "cores", "sessions", "memory_bytes")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    since: float
    cores: int
    sessions: int
    memory_bytes: int
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., since: _Optional[float] = ..., cores: _Optional[int] = ..., sessions: _Optional[int] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("coordinator", "platform", "memory_limit_bytes")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    coordinator: str
    platform: str
    memory_limit_bytes: int
    def __init__(self, coordinator: _Optional[str] = ..., platform: _Optional[str] = ..., memory_limit_bytes: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class Commands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("attach", "upload", "execute", "release", "download", "copy", "compile", "stats", "goodbye")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    EXECUTE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    DOWNLOAD_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    attach: Attach
    upload: Upload
    execute: Execute
    release: Release
    download: Download
    copy: Copy
    compile: Compile
    stats: Stats
    goodbye: Goodbye
    def __init__(self, attach: _Optional[_Union[Attach, _Mapping]] = ..., upload: _Optional[_Union[Upload, _Mapping]] = ..., execute: _Optional[_Union[Execute, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., download: _Optional[_Union[Download, _Mapping]] = ..., copy: _Optional[_Union[Copy, _Mapping]] = ..., compile: _Optional[_Union[Compile, _Mapping]] = ..., stats: _Optional[_Union[Stats, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("protocol", "job", "cores", "ordinal", "snapshot")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job: str
    cores: _containers.RepeatedScalarFieldContainer[int]
    ordinal: int
    snapshot: int
    def __init__(self, protocol: _Optional[int] = ..., job: _Optional[str] = ..., cores: _Optional[_Iterable[int]] = ..., ordinal: _Optional[int] = ..., snapshot: _Optional[int] = ...) -> None: ...

class ArrayType(_message.Message):
    __slots__ = ("dtype", "dims")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    dims: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., dims: _Optional[_Iterable[int]] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("array", "type", "core", "data", "ends")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    array: int
    type: ArrayType
    core: int
    data: bytes
    ends: bool
    def __init__(self, array: _Optional[int] = ..., type: _Optional[_Union[ArrayType, _Mapping]] = ..., core: _Optional[int] = ..., data: _Optional[bytes] = ..., ends: bool = ...) -> None: ...

class Execute(_message.Message):
    __slots__ = ("sequence", "program", "cores", "arguments", "first_result", "keep")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RESULT_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    program: int
    cores: _containers.RepeatedScalarFieldContainer[int]
    arguments: _containers.RepeatedScalarFieldContainer[int]
    first_result: int
    keep: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., program: _Optional[int] = ..., cores: _Optional[_Iterable[int]] = ..., arguments: _Optional[_Iterable[int]] = ..., first_result: _Optional[int] = ..., keep: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("arrays", "programs")
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedScalarFieldContainer[int]
    programs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arrays: _Optional[_Iterable[int]] = ..., programs: _Optional[_Iterable[int]] = ...) -> None: ...

class Download(_message.Message):
    __slots__ = ("request", "array")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    request: int
    array: int
    def __init__(self, request: _Optional[int] = ..., array: _Optional[int] = ...) -> None: ...

class Copy(_message.Message):
    __slots__ = ("array", "source", "core")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    array: int
    source: int
    core: int
    def __init__(self, array: _Optional[int] = ..., source: _Optional[int] = ..., core: _Optional[int] = ...) -> None: ...

class Compile(_message.Message):
    __slots__ = ("request", "options", "hlo", "ends")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    HLO_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    request: int
    options: bytes
    hlo: bytes
    ends: bool
    def __init__(self, request: _Optional[int] = ..., options: _Optional[bytes] = ..., hlo: _Optional[bytes] = ..., ends: bool = ...) -> None: ...

class Stats(_message.Message):
    __slots__ = ("request", "core")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CORE_FIELD_NUMBER: _ClassVar[int]
    request: int
    core: int
    def __init__(self, request: _Optional[int] = ..., core: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Answers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("attached", "executed", "part", "ended", "moved")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    executed: Executed
    part: Part
    ended: Ended
    moved: Moved
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., executed: _Optional[_Union[Executed, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: int
    def __init__(self, snapshot: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Executed(_message.Message):
    __slots__ = ("sequence", "failure")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    failure: Failure
    def __init__(self, sequence: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("request", "data", "ends", "failure")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    request: int
    data: bytes
    ends: bool
    failure: Failure
    def __init__(self, request: _Optional[int] = ..., data: _Optional[bytes] = ..., ends: bool = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: Failure
    def __init__(self, failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("program", "name", "results", "replicas", "optimized_hlo", "code_size_bytes", "fingerprint", "partitions")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZED_HLO_FIELD_NUMBER: _ClassVar[int]
    CODE_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    program: int
    name: str
    results: _containers.RepeatedCompositeFieldContainer[ArrayType]
    replicas: int
    optimized_hlo: bytes
    code_size_bytes: int
    fingerprint: str
    partitions: int
    def __init__(self, program: _Optional[int] = ..., name: _Optional[str] = ..., results: _Optional[_Iterable[_Union[ArrayType, _Mapping]]] = ..., replicas: _Optional[int] = ..., optimized_hlo: _Optional[bytes] = ..., code_size_bytes: _Optional[int] = ..., fingerprint: _Optional[str] = ..., partitions: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("bytes",)
    class BytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: _containers.ScalarMap[str, int]
    def __init__(self, bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class KeepRequest(_message.Message):
    __slots__ = ("protocol", "job", "name", "size", "data")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job: str
    name: str
    size: int
    data: bytes
    def __init__(self, protocol: _Optional[int] = ..., job: _Optional[str] = ..., name: _Optional[str] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KeepReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecallRequest(_message.Message):
    __slots__ = ("protocol", "job", "name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    job: str
    name: str
    def __init__(self, protocol: _Optional[int] = ..., job: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RecallReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Kept(_message.Message):
    __slots__ = ("holder", "name", "bytes", "left_s")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    name: str
    bytes: int
    left_s: float
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., name: _Optional[str] = ..., bytes: _Optional[int] = ..., left_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "protocol", "platform", "cores", "draining", "jobs", "max_jobs", "waiting", "jobs_served", "up_s", "kept")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    MAX_JOBS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    JOBS_SERVED_FIELD_NUMBER: _ClassVar[int]
    UP_S_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    platform: str
    cores: int
    draining: bool
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    max_jobs: int
    waiting: int
    jobs_served: int
    up_s: float
    kept: _containers.RepeatedCompositeFieldContainer[Kept]
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., platform: _Optional[str] = ..., cores: _Optional[int] = ..., draining: bool = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., max_jobs: _Optional[int] = ..., waiting: _Optional[int] = ..., jobs_served: _Optional[int] = ..., up_s: _Optional[float] = ..., kept: _Optional[_Iterable[_Union[Kept, _Mapping]]] = ...) -> None: ...
