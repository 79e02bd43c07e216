"""The checksum of event records."""

import io
import random

from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c as tensorboards
from tensorboard.summary.writer.record_writer import RecordWriter

from gapless_uploader.sinks._crc32c import frame, masked_crc32c


def test_every_length_round_the_blocks_matches_tensorboard() -> None:
    """The checksum is TensorBoard's own for every length up to, at and beyond a block."""
    chance = random.Random(7)
    lengths = [*range(140), *range(1018, 1034), *range(2042, 2058), 5000]
    data = [chance.randbytes(length) for length in lengths]

    assert [tensorboards(one) for one in data] == [masked_crc32c(one) for one in data]


def test_a_frame_is_what_tensorboards_writer_writes() -> None:
    """A framed record is byte for byte that of TensorBoard's own record writer."""
    file = io.BytesIO()
    RecordWriter(file).write(b"event" * 300)

    assert file.getvalue() == frame(b"event" * 300)
