"""Helpers of tests/contract: sums of gradients, and calls in threads that start together."""

import threading
from concurrent.futures import ThreadPoolExecutor


def plus(*lists):
    """The sum of lists of tensors, element by element."""
    return [sum(tensors) for tensors in zip(*lists, strict=True)]


def in_threads(*calls):
    """Run each call in a thread of its own, all begun together; return their results, or raise the first error."""
    barrier = threading.Barrier(len(calls))

    def run(call):
        barrier.wait(600)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
