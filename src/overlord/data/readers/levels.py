"""Parquet's levels, which say where lists begin and what is missing: runs of equal values, and bits in groups of eight.

Arrow makes a number of each level. Where lists are long, reading the few bytes of the runs is much less work.
"""

from __future__ import annotations

from overlord.data.readers.thrift import read_varint

_ZERO_BITS = tuple(tuple(bit for bit in range(8) if not byte >> bit & 1) for byte in range(256))


def zeros(levels: bytes, num_values: int, first: int = 0) -> list[int]:
    """Where the level is 0, of levels that are 0 or 1, counted from `first` on."""
    found: list[int] = []
    append, position = found.append, first
    left = iter(levels)
    try:
        for head in left:  # twice for each list, so no calls in here, and what is usual first
            if head == 3:
                for bit in _ZERO_BITS[next(left)]:
                    append(position + bit)
                position += 8
                continue
            if head > 0x7F:
                head, shift = head & 0x7F, 7
                while (byte := next(left)) > 0x7F and shift < 63:
                    head |= (byte & 0x7F) << shift
                    shift += 7
                head |= byte << shift
            if head & 1:
                for _ in range(head >> 1):
                    for bit in _ZERO_BITS[next(left)]:
                        append(position + bit)
                    position += 8
            else:
                end, level = position + (head >> 1), next(left)
                if level == 0 and end <= first + num_values:
                    found.extend(range(position, end))
                elif level > 1:
                    raise ValueError(f"a level of {level}, where the most is 1")
                position = end
    except StopIteration:
        raise ValueError("levels end in the middle of a run") from None
    _check_length(position - first, num_values)
    while found and found[-1] >= first + num_values:  # what fills the last group up
        found.pop()
    return found


def others(levels: bytes, num_values: int, usual: int) -> list[tuple[int, int]]:
    """(where, level) of every level but the `usual` one, which is the largest there is and below 256."""
    width = usual.bit_length()
    all_usual = sum(usual << width * i for i in range(8)).to_bytes(width, "little")
    found: list[tuple[int, int]] = []
    position = at = 0
    while at < len(levels):
        head, at = read_varint(levels, at)
        count = head >> 1
        end = position + (8 * count if head & 1 else count)
        _check_length(max(end, num_values), num_values)
        if head & 1:
            for group in range(at, at + count * width, width):
                if (packed := levels[group : group + width]) != all_usual:
                    found += _others_of_group(packed, width, usual, position)
                position += 8
            at += count * width
        else:
            if levels[at] != usual:
                found += [(where, levels[at]) for where in range(position, position + count)]
            position += count
            at += 1
    _check_length(position, num_values)
    return [(where, level) for where, level in found if where < num_values]


def _others_of_group(packed: bytes, width: int, usual: int, position: int) -> list[tuple[int, int]]:
    bits = int.from_bytes(packed, "little")
    levels = [bits >> width * i & (1 << width) - 1 for i in range(8)]
    return [(position + i, level) for i, level in enumerate(levels) if level != usual]


def _check_length(num_levels: int, num_values: int) -> None:
    if not num_values <= num_levels < num_values + 8:
        raise ValueError(f"{num_levels} levels for {num_values} values")
