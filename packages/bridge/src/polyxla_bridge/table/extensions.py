"""Extensions of PJRT's function table: the profiler, and arrays that processes send each other.

Without the profiler extension, torch_xla warns in every process, and ends a process that takes a profile.
With it, the framework's profile shows what the engine runs.

TorchTPU's send and recv call the extension for cross-host transfers: the receiver makes a buffer, and passes
its descriptor to the sender through the store of torch.distributed.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from ctypes import c_char_p, c_void_p
from typing import Any

from polyxla_bridge import abi, native
from polyxla_bridge.abi import DTYPES
from polyxla_bridge.programs.executable import ArrayType
from polyxla_bridge.table.handles import ArrayTypes, Bridge, array, read_array

_Call = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_log = logging.getLogger("polyxla.bridge")


class Profiler:
    """The extension for profiles. A process takes one profile at a time.

    Args:
        bridge: its engine is profiled, if it has started.
        next_extension: the address of the table's next extension.
    """

    def __init__(self, bridge: Bridge, next_extension: int | None = None) -> None:
        self._bridge = bridge
        self._profile = b""
        self._callbacks = {
            name: _Call(_guarded(function))
            for name, function in {
                "create": self._create,
                "start": self._start,
                "stop": self._stop,
                "collect_data": self._collect,
            }.items()
        }
        self._api = abi.ProfilerApi(struct_size=ctypes.sizeof(abi.ProfilerApi))
        # `_guarded` never returns an error, so no caller has an error to read or destroy.
        for name in ("error_destroy", "error_message", "error_get_code", "destroy"):
            setattr(self._api, name, native.address("polyxla_nothing"))
        for name, callback in self._callbacks.items():
            setattr(self._api, name, ctypes.cast(callback, c_void_p).value)
        self._extension = abi.ProfilerExtension(profiler_api=ctypes.addressof(self._api))
        base = self._extension.base
        base.struct_size, base.type = ctypes.sizeof(abi.ProfilerExtension), abi.EXTENSION_TYPE_PROFILER
        base.next = next_extension

    @property
    def address(self) -> int:
        """The extension's address."""
        return ctypes.addressof(self._extension)

    def silence(self) -> None:
        """Replace each Python function by a C function that does nothing."""
        for name in self._callbacks:
            setattr(self._api, name, native.address("polyxla_nothing"))

    def _create(self, args: int) -> None:
        # The caller only passes the pointer back, and there is one profile at a time: any address will do.
        abi.ProfilerCreate.from_address(args).profiler = self.address

    def _start(self, args: int) -> None:
        self._profile = b""
        if self._bridge.is_started:
            self._bridge.engine.start_profile()

    def _stop(self, args: int) -> None:
        if self._bridge.is_started:
            self._profile = self._bridge.engine.stop_profile()

    def _collect(self, args: int) -> None:
        """Answer with the profile, which stays in memory until the next one."""
        data = abi.ProfilerCollectData.from_address(args)
        data.buffer = ctypes.cast(c_char_p(self._profile), c_void_p).value
        data.buffer_size_in_bytes = len(self._profile)


def _guarded(function: Callable[[int], None]) -> Callable[[int], None]:
    def entry(args: Any) -> None:
        try:
            function(args)
        except Exception:
            # No exception may reach C, and a failed profile must not end a training.
            _log.warning("the profile lacks the operations of the devices", exc_info=True)

    return entry


class Extension:
    """An extension whose functions take a pointer to their arguments, and return an error or null.

    Args:
        bridge: makes the errors.
        struct: of the extension.
        type_: its number in PJRT.
        functions: by the names of the struct's fields.
        next_extension: the address of the table's next extension.
    """

    def __init__(
        self,
        bridge: Bridge,
        struct: type[Any],
        type_: int,
        functions: Mapping[str, Callable[[int], None]],
        next_extension: int | None,
    ) -> None:
        self._bridge = bridge
        self._callbacks = {name: _Call(self._answered(function)) for name, function in functions.items()}
        self._extension: Any = struct(
            **{name: ctypes.cast(callback, c_void_p).value for name, callback in self._callbacks.items()}
        )
        base = self._extension.base
        base.struct_size, base.type, base.next = ctypes.sizeof(struct), type_, next_extension

    @property
    def address(self) -> int:
        """The extension's address."""
        return ctypes.addressof(self._extension)

    def silence(self) -> None:
        """Replace each Python function by a C function that does nothing."""
        for name in self._callbacks:
            setattr(self._extension, name, native.address("polyxla_nothing"))

    def _answered(self, function: Callable[[int], None]) -> Callable[[int], int | None]:
        def entry(args: int) -> int | None:
            try:
                function(args)
            except BaseException as error:
                return self._bridge.error(error)
            return None

        return entry


class CrossHost(Extension):
    """The extension for arrays that processes send each other.

    Args:
        bridge: its engine moves the arrays.
        next_extension: the address of the table's next extension.
    """

    def __init__(self, bridge: Bridge, next_extension: int | None) -> None:
        functions = {"make_receive_buffers": self._make_buffers, "copy_to_remote_device": self._copy}
        struct, type_ = abi.CrossHostTransfersExtension, abi.EXTENSION_TYPE_CROSS_HOST_TRANSFERS
        super().__init__(bridge, struct, type_, functions, next_extension)

    def _make_buffers(self, pointer: int) -> None:
        args = abi.MakeCrossHostReceiveBuffers.from_address(pointer)
        ranks = read_array(args.shape_num_dims, args.num_shapes, ctypes.c_size_t)
        dims = read_array(args.num_dims, args.num_shapes, c_void_p)
        kinds = read_array(args.element_types, args.num_shapes, ctypes.c_int)
        types = [
            ArrayType(DTYPES[kind], tuple(read_array(sizes, rank, ctypes.c_int64)))
            for kind, sizes, rank in zip(kinds, dims, ranks, strict=True)
        ]
        device = self._bridge.handles[args.device].device
        made = [self._bridge.engine.receive(device, type_) for type_ in types]
        handles = self._bridge.make_buffers(args.device, [buffer for buffer, _ in made], ArrayTypes(types))
        (c_void_p * len(made)).from_address(args.buffers)[:] = handles[: len(made)]
        args.num_buffers = len(made)
        texts = [ctypes.create_string_buffer(descriptor) for _, descriptor in made]
        sizes = array([len(descriptor) for _, descriptor in made], ctypes.c_size_t)
        notify = abi.ReceiveNotifier(args.notifier)
        # An announced array is never taken back: the extension has no function to cancel it.
        notify(
            None,
            array([ctypes.addressof(text) for text in texts]),
            sizes,
            len(made),
            args.user_arg,
            None,
            None,
        )

    def _copy(self, pointer: int) -> None:
        args = abi.CopyToRemoteDevice.from_address(pointer)
        (size,) = read_array(args.serialized_descriptor_size, 1, ctypes.c_size_t)
        (start,) = read_array(args.serialized_descriptor, 1, c_void_p)
        # Copy the bytes before the destructor frees them.
        descriptor = ctypes.string_at(start, size)
        abi.DescriptorDestructor(args.descriptor_destructor)(
            args.serialized_descriptor, args.serialized_descriptor_size
        )
        on_done, user_arg = abi.SendCallback(args.on_done), args.user_arg

        def done(sent: Future[None]) -> None:
            failure = sent.exception()
            error = self._bridge.error(failure) if failure else None
            on_done(error, failure is None, user_arg)
            # The callback only reads the error, which stays this function's.
            if error:
                destroy = abi.ARGS["Error_Destroy"](error=error)
                native.UNLOCKED.PJRT_Error_Destroy(ctypes.byref(destroy))

        # This function of the table returns no error, so a failure must go to the caller's callback.
        try:
            self._bridge.drain()
            sent = self._bridge.engine.send(self._bridge.buffer(args.buffer), descriptor)
        except BaseException as error:
            sent = Future()
            sent.set_exception(error)
        sent.add_done_callback(done)
