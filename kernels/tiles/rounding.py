"""Whole numbers on the host."""


def cdiv(size: int, block: int) -> int:
    """Number of blocks that hold `size`; Triton's own function asks on every call whether it is compiled."""
    return -(-size // block)


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`, which is at least 1."""
    return 1 << (size - 1).bit_length()
