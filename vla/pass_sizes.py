"""The sizes of the batches into which an update divides its minibatches."""


def recorded_sizes(largest: int) -> list[int]:
    """The batch sizes that a large network's passes with gradient should have: powers of 2, 3 times these, `largest`.

    Each is warmed up and recorded by itself: all 31 sizes up to 31 would take five times as long as these ten.
    """
    powers = [2**exponent for exponent in range(largest.bit_length())]
    return sorted({size for power in powers for size in (power, 3 * power) if size < largest} | {largest})


def pass_sizes(count: int, largest: int, few_sizes: bool) -> list[int]:
    """Divide `count` observations into passes of at most `largest`. few_sizes: only into `recorded_sizes`."""
    sizes = recorded_sizes(largest) if few_sizes else range(1, largest + 1)
    parts = []
    while count > 0:
        parts.append(max(size for size in sizes if size <= count))
        count -= parts[-1]
    return parts
