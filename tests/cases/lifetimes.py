"""Lifetimes of what a program allocates, as a run follows them."""

from math import prod

from fusedmlp.kernels.launching.program import Addresses, Allocation
from fusedmlp.kernels.operands.arrays import Array
from fusedmlp.kernels.operands.descriptors import Descriptor


def read(program, launch):
    """Sources that a launch reads or writes, also through tables of addresses."""
    values = [value.array if type(value) is Descriptor else value for value in launch.arguments.values()]
    sources = [value.source for value in values if type(value) is Array]
    for source in sources:  # which grows
        allocation = program.allocations[source - program.num_arguments] if source >= program.num_arguments else None
        if isinstance(allocation, Addresses):
            sources += [element.source for element in allocation.elements if isinstance(element, Array)]
    return {source for source in sources if source >= program.num_arguments}


def alive(program):
    """The sources that are allocated during each launch, and after the last."""
    found, now = [], set()
    for freed, made in program.lifetimes():
        now = now - {*freed} | {source for source, _ in made}
        found.append(now)
    return found


def most_bytes(program):
    """Most bytes that a run has allocated at a time."""

    def size(source):
        allocation = program.allocations[source - program.num_arguments]
        return prod(allocation.shape) * allocation.dtype.itemsize if isinstance(allocation, Allocation) else 0

    return max(sum(map(size, sources)) for sources in alive(program))
