"""Computes convolutions, max-pooling and their gradients by one partitioned program, and with torch alone.

The command line says what is divided. Prints whether all numbers are equal.
"""

import copy
import sys

import numpy as np
import torch
import torch_xla.distributed.spmd.xla_sharding as xs
import torch_xla.runtime as xr

from polyxla_bridge.engine.expansions import convolution

DIVIDED = {
    "batch": ((4, 1), (8, 3, 16, 16), (0, None, None, None), None),
    "batch on one axis": ((2, 2), (8, 3, 16, 16), (0, None, None, None), None),
    "batch, unevenly": ((4, 1), (6, 3, 16, 16), (0, None, None, None), None),
    "nothing": ((4, 1), (8, 3, 16, 16), (None, None, None, None), None),
    "height": ((4, 1), (8, 3, 16, 16), (None, None, 0, None), None),
    "height on one axis": ((2, 2), (8, 3, 16, 16), (None, None, 0, None), None),
    "batch and height": ((2, 2), (8, 3, 16, 16), (0, None, 1, None), None),
    "batch and kernel": ((2, 2), (8, 3, 16, 16), (0, None, None, None), (1, None, None, None)),
}
"""The mesh, the size of the images, and which axes divide the images and the first kernel."""

convolution.LEAST_WORK = convolution._LEAST_FEATURES = 0


def computed(model: torch.nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    images.requires_grad_()
    result = model(images)
    weights = torch.linspace(-1, 1, result.numel()).reshape(result.shape).to(result.device)
    # The gradient of the result is divided as the result is.
    (result.square() * weights).sum().backward()
    gradients = [images.grad, *(parameter.grad for parameter in model.parameters())]
    return [result.detach().cpu(), *(gradient.cpu() for gradient in gradients if gradient is not None)]


xr.use_spmd()
shape, size, of_images, of_kernel = DIVIDED[sys.argv[1]]
mesh = xs.Mesh(np.arange(4), shape, ("first", "second"))
torch.manual_seed(0)
here = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, padding=1),
    torch.nn.MaxPool2d(2, stride=1),
    torch.nn.Conv2d(8, 8, 3, stride=2, groups=2),
    torch.nn.ConvTranspose2d(8, 4, 3, stride=2),
)
there = copy.deepcopy(here).to("xla")
data = torch.randn(size)
images = data.to("xla")
xs.mark_sharding(images, mesh, of_images)
if of_kernel is not None:
    xs.mark_sharding(next(there.parameters()), mesh, of_kernel)
pairs = zip(computed(here, data), computed(there, images), strict=True)
print(all(torch.allclose(a, b, 1e-4, 1e-4) for a, b in pairs))
