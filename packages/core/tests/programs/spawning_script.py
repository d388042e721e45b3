"""Calls one of its functions in a spawned worker process."""

import concurrent.futures
import multiprocessing


def square(n: int) -> int:
    return n * n


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        print(pool.submit(square, 7).result(timeout=60))
