"""Each rank sends to others in every way that torch.distributed has, and compares what it receives."""

import time

import torch
import torch.distributed as dist

LARGE, MANY = 1 << 20, 12


def filled(number: float, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3,)) -> torch.Tensor:
    return torch.full(shape, number, dtype=dtype, device="tpu")


def same(received: torch.Tensor, expected: torch.Tensor | float) -> None:
    expected = torch.as_tensor(expected, dtype=received.dtype).expand(received.shape)
    found = received.cpu()
    assert torch.equal(found, expected), f"{found} is not {expected}"


def blocking(rank: int, after: int, before: int) -> None:
    """An odd rank receives before it sends; what it has received it computes with, and sends on."""
    for turn in range(3):
        if rank % 2 == 0:
            dist.send(filled(10 * turn + rank), after)
            received = filled(-1)
            dist.recv(received, before)
            same(received, 10 * turn + (before - 1) + 0.5)
        else:
            received = filled(-1)
            dist.recv(received, before)
            same(received, 10 * turn + before)
            dist.send(received + 0.5, after)


def kinds(rank: int, after: int, before: int) -> None:
    """Both directions at once, for each dtype and for shapes that are not a row."""
    dtypes = (torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool)
    for dtype in dtypes:
        sent, received = filled(rank % 2, dtype), filled(0, dtype)
        works = [dist.isend(sent, after), dist.irecv(received, before)]
        for work in works:
            work.wait()
        same(received, before % 2)
    for shape in ((), (0,), (2, 3, 4)):
        received = filled(-1, shape=shape)
        works = [dist.isend(filled(rank, shape=shape), after), dist.irecv(received, before)]
        for work in works:
            work.wait()
        same(received, before)


def tags(rank: int, after: int, before: int) -> None:
    """Each tag is a row of its own, whatever the order in which the other side calls."""
    works = [dist.isend(filled(100 * tag + rank), after, tag=tag) for tag in (1, 2, 3)]
    received = {tag: filled(-1) for tag in (3, 1, 2)}
    works += [dist.irecv(tensor, before, tag=tag) for tag, tensor in received.items()]
    for work in works:
        work.wait()
    for tag, tensor in received.items():
        same(tensor, 100 * tag + before)


def many(rank: int, after: int, before: int, slow: int) -> None:
    """The n-th recv of a pair meets its n-th send, where the ranks of one parity are slow."""
    received = [filled(-1) for _ in range(MANY)]
    works = []
    if rank % 2 == slow:
        time.sleep(1)
        works += [dist.isend(filled(100 * n + rank), after) for n in range(MANY)]
        works += [dist.irecv(tensor, before) for tensor in received]
    else:
        works += [dist.irecv(tensor, before) for tensor in received]
        works += [dist.isend(filled(100 * n + rank), after) for n in range(MANY)]
    for work in works:
        work.wait()
    for n, tensor in enumerate(received):
        same(tensor, 100 * n + before)


def ring(rank: int, after: int, before: int) -> None:
    """A batch that sends before it receives, small and large."""
    small, large = filled(-1), torch.zeros(LARGE, dtype=torch.int64, device="tpu")
    ops = [
        dist.P2POp(dist.isend, filled(rank), after),
        dist.P2POp(dist.isend, torch.arange(LARGE, device="tpu") + rank, after),
        dist.P2POp(dist.irecv, small, before),
        dist.P2POp(dist.irecv, large, before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(small, before)
    same(large, torch.arange(LARGE) + before)


def in_groups(rank: int, size: int) -> None:
    """Ranks 0 and 1, and ranks 2 and 3, form groups: each has rows of its own beside the world's."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
    group, peer = groups[rank // 2], rank ^ 1
    inside, outside = filled(-1), filled(-1)
    works = [
        dist.isend(filled(rank), peer),
        dist.isend(filled(100 + rank), peer, group=group),
        dist.irecv(inside, peer, group=group),
        dist.irecv(outside, peer),
    ]
    for work in works:
        work.wait()
    same(inside, 100 + peer)
    same(outside, peer)


def objects(rank: int) -> None:
    """Objects travel as tensors."""
    if rank == 0:
        dist.send_object_list([{"epoch": 3}, "text"], dst=1)
    elif rank == 1:
        found = [None, None]
        dist.recv_object_list(found, src=0)
        assert found == [{"epoch": 3}, "text"], found


def check() -> None:
    """Check every way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    blocking(rank, after, before)
    kinds(rank, after, before)
    tags(rank, after, before)
    for slow in (0, 1):
        many(rank, after, before, slow)
    ring(rank, after, before)
    in_groups(rank, size)
    objects(rank)


if __name__ == "__main__":
    dist.init_process_group("tpu_dist")
    check()
    print(f"rank {dist.get_rank()}: right\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()
