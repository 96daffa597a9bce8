"""The order of samples as a pure function of (seed, epoch, position), for any length, in constant memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

# Up to here a sort of keyed hashes, which is unbiased; above, a Feistel network, which needs no memory.
_SMALL = 1 << 16
_BLOCK = 1 << 16  # positions computed at once, so that a batch costs a slice
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(word: int) -> int:
    """One 64-bit word hashed to another (the finaliser of splitmix64, Steele et al. 2014)."""
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def key_of(*parts: int) -> int:
    """One 64-bit key from several whole numbers; every part counts, and so does their order."""
    key = 0
    for part in parts:
        key = mix(key ^ mix(part & _MASK))
    return key


def mix_words(words: _Words) -> _Words:
    """``mix`` of every word, in place: an order of 10^9 samples passes here, so each temporary array shows."""
    shifted = np.empty_like(words)
    words += np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(words, np.uint64(shift), out=shifted)
        words ^= shifted
        words *= np.uint64(factor)
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def shuffled(positions: Indices, length: int, seed: int, epoch: int) -> Indices:
    """Which samples stand at these positions of an epoch's order: a permutation of ``range(length)``.

    Args:
        positions: ``[n]``, each in ``[0, length)``.
    """
    key = key_of(seed, epoch)
    if length <= _SMALL:
        return _sorted_hashes(length, key)[positions]
    return _feistel(positions, length, key)


def _sorted_hashes(length: int, key: int) -> Indices:
    hashes = mix_words(np.arange(length, dtype=np.uint64) ^ np.uint64(key))
    return np.argsort(hashes)  # mix is one to one, so there are no ties


def _feistel(positions: Indices, length: int, key: int) -> Indices:
    """A keyed permutation of the next power of two, walked until it falls below the length (Black and Rogaway 2002)."""
    bits = int(length - 1).bit_length()
    keys = [np.uint64(key_of(key, number)) for number in range(_ROUNDS)]
    words = _rounds(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(words >= np.uint64(length))
    while len(outside):
        walked = _rounds(words[outside], bits, keys)
        words[outside] = walked
        outside = outside[walked >= np.uint64(length)]
    return words.view(np.int64)


def _rounds(words: _Words, bits: int, keys: list[np.uint64]) -> _Words:
    low_bits = bits // 2
    high_bits = bits - low_bits
    low = np.empty_like(words)
    for key in keys:
        # The halves swap places, and with an odd number of bits their widths: each round keeps one half as it is.
        np.bitwise_and(words, np.uint64((1 << low_bits) - 1), out=low)
        words >>= np.uint64(low_bits)
        hashed = mix_words(low ^ key)
        hashed &= np.uint64((1 << high_bits) - 1)
        words ^= hashed
        low <<= np.uint64(high_bits)
        words |= low
        low_bits, high_bits = high_bits, low_bits
    return words


class Order:
    """The order of all epochs: shuffled by (seed, epoch), or as stored.

    Attributes:
        length: Samples per epoch.
    """

    def __init__(self, length: int, seed: int, shuffle: bool) -> None:
        self.length = length
        self._seed = seed
        self._shuffle = shuffle
        self._block: tuple[int, int, Indices] = (-1, -1, np.empty(0, np.int64))

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        """The samples at positions ``start`` to ``stop`` of an epoch: ``[stop - start]`` int64."""
        if not self._shuffle:
            return np.arange(start, stop, dtype=np.int64)
        parts = []
        while start < stop:
            block = start // _BLOCK
            samples = self._samples_of(epoch, block)
            end = min(stop, (block + 1) * _BLOCK)
            parts.append(samples[start - block * _BLOCK : end - block * _BLOCK])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def _samples_of(self, epoch: int, block: int) -> Indices:
        if self._block[:2] != (epoch, block):
            first = block * _BLOCK
            positions = np.arange(first, min(first + _BLOCK, self.length), dtype=np.int64)
            self._block = (epoch, block, shuffled(positions, self.length, self._seed, epoch))
        return self._block[2]


def share(num_rows: int, part: int, num_parts: int) -> tuple[int, int]:
    """Start and stop of one of ``num_parts`` contiguous shares; sizes differ by at most one, the first are larger."""
    size, larger = divmod(num_rows, num_parts)
    start = part * size + min(part, larger)
    return start, start + size + (part < larger)
