"""``products.py FILE`` saves products of the device: as they are, and of operands rounded to bfloat16."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

import polyxla
from polyxla import Replica


def rounded(tensor: Tensor) -> Tensor:
    """Round on the host: a compiler may leave out a conversion and the one back."""
    return tensor.cpu().bfloat16().float().to(tensor.device)


class Product(torch.autograd.Function):
    """A product of matrices that rounds its operands, and those of its gradients."""

    @staticmethod
    def forward(context: Any, left: Tensor, right: Tensor) -> Tensor:
        context.save_for_backward(left, right)
        return rounded(left) @ rounded(right)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        left, right = context.saved_tensors
        gradient = rounded(gradients[0])
        return gradient @ rounded(right).mT, rounded(left).mT @ gradient


class Convolution(torch.autograd.Function):
    """A convolution that does the same."""

    @staticmethod
    def forward(context: Any, image: Tensor, kernel: Tensor) -> Tensor:
        context.save_for_backward(image, kernel)
        return F.conv2d(rounded(image), rounded(kernel))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        image, kernel = context.saved_tensors
        gradient = rounded(gradients[0])
        return (
            conv2d_input(image.shape, rounded(kernel), gradient),
            conv2d_weight(rounded(image), kernel.shape, gradient),
        )


def attention(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return attention of a sequence to another, by a product of matrices."""

    def attend(queries: Tensor, keys: Tensor) -> Tensor:
        return product(torch.softmax(product(queries, keys.mT), dim=-1), keys)

    return attend


PRODUCTS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (torch.matmul, Product.apply, (16, 64), (64, 8)),
    "batched": (torch.matmul, Product.apply, (3, 16, 64), (3, 64, 8)),
    "einsum": (lambda x, y: torch.einsum("bik,bkj->bij", x, y), Product.apply, (3, 8, 32), (3, 32, 8)),
    "attention": (attention(torch.matmul), attention(Product.apply), (2, 8, 16), (2, 8, 16)),
    "convolution": (F.conv2d, Convolution.apply, (2, 3, 8, 8), (4, 3, 3, 3)),
}


def compute(replica: Replica) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """Return each product and its gradients, as they are and with rounded operands."""
    return {
        name: (_with_gradients(replica, plain, shapes), _with_gradients(replica, explicit, shapes))
        for name, (plain, explicit, *shapes) in PRODUCTS.items()
    }


def _with_gradients(
    replica: Replica, product: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> list[Tensor]:
    torch.manual_seed(0)
    operands: list[Any] = [replica.to_device(torch.randn(shape)).requires_grad_() for shape in shapes]
    result = product(*operands)
    result.backward(replica.to_device(torch.randn(result.shape)))
    return [result.detach().cpu(), *(operand.grad.cpu() for operand in operands)]


if __name__ == "__main__":
    (computed,) = polyxla.launch(compute, devices=1)
    torch.save(computed, sys.argv[1])
