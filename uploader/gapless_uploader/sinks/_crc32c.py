"""CRC-32C of event records, by table look-ups over whole blocks: the `tensorboard` package's own goes byte by byte in
Python, which takes longer than all the rest of a replay.

A CRC is linear: the sum of what each byte adds on its own, which depends on the byte and on how many follow. The state
from before a block counts as if it were XORed into the block's first four bytes.
"""

from __future__ import annotations

from functools import cache
from struct import pack
from typing import Any

from gapless_uploader.sinks import need

_POLYNOMIAL = 0x82F63B78
_BLOCK = 1024


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C of `data`, rotated and offset as TFRecord files hold it."""
    crc = _crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """`data` as one record of a TFRecord file."""
    size = pack("<Q", len(data))
    return b"%b%b%b%b" % (size, pack("<I", masked_crc32c(size)), data, pack("<I", masked_crc32c(data)))


def _crc32c(data: bytes) -> int:
    state = 0xFFFFFFFF
    if len(data) < 64:
        table = _bytewise()
        for byte in data:
            state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
        return state ^ 0xFFFFFFFF
    numpy, table, places = _blockwise()
    # The first block is the short one, and no block has fewer than four bytes.
    start, end = 0, max(4, len(data) % _BLOCK or _BLOCK)
    while start < len(data):
        block = numpy.frombuffer(data, numpy.uint8, end - start, start).astype(numpy.intp)
        block[:4] ^= numpy.frombuffer(pack("<I", state), numpy.uint8)
        state = int(numpy.bitwise_xor.reduce(table.take(block + places[_BLOCK - len(block) :])))
        start, end = end, min(end + _BLOCK, len(data))
    return state ^ 0xFFFFFFFF


@cache
def _bytewise() -> list[int]:
    """Byte -> what it adds when nothing follows."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


@cache
def _blockwise() -> tuple[Any, Any, Any]:
    """numpy; what byte b at place p of a block adds, at [256 * p + b]; 256 * p for every place."""
    numpy = need("tensorboard", "numpy")
    last = numpy.array(_bytewise(), numpy.uint32)
    rows = [last]
    while len(rows) < _BLOCK:
        rows.append(last[rows[-1] & 0xFF] ^ (rows[-1] >> 8))
    return numpy, numpy.concatenate(rows[::-1]), numpy.arange(_BLOCK) * 256
