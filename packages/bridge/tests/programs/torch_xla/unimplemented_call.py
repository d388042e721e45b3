"""Calls a PJRT function that the bridge does not implement, and prints its error."""

import ctypes

import torch

from polyxla_bridge import LIBRARY, abi

torch.ones(1, device="xla")
library = ctypes.CDLL(str(LIBRARY))
library.GetPjrtApi.restype = ctypes.c_void_p
api = abi.Api.from_address(library.GetPjrtApi())
error = abi.CALLBACKS["Client_DmaMap"](api.Client_DmaMap)(ctypes.byref(abi.ARGS["Client_DmaMap"]()))
message = abi.ARGS["Error_Message"](error=error)
abi.CALLBACKS["Error_Message"](api.Error_Message)(ctypes.byref(message))
print(ctypes.string_at(message.message, message.message_size).decode())
