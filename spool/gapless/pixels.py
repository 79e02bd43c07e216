"""Arrays as PNG and WAV by the standard library, as GIF by pillow where it is installed."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

from gapless.numeric import Refused

MAX_PIXELS = 1 << 26


def image_array(data: Any) -> tuple[bytes, int, int, int]:
    """Bytes of 8-bit pixels, row by row, with width, height and channels (1, 3 or 4). Raises `Refused`."""
    if hasattr(data, "savefig"):
        return _figure(data)
    if hasattr(data, "convert") and hasattr(data, "tobytes") and hasattr(data, "mode"):
        mode = data.mode if data.mode in ("L", "RGB", "RGBA") else "RGBA" if "A" in data.getbands() else "RGB"
        picture = data if data.mode == mode else data.convert(mode)
        width, height = picture.size
        return picture.tobytes(), width, height, len(mode)
    array, first = _array(data)
    if array.ndim == 3 and array.shape[0] in (1, 3, 4) and (first or array.shape[2] not in (1, 3, 4)):
        array = array.transpose(1, 2, 0)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise Refused(f"an image is H x W, H x W x C or C x H x W with C 1, 3 or 4, not {tuple(array.shape)}")
    height, width, channels = array.shape
    return _eight_bits(array).tobytes(), width, height, channels


def video_array(data: Any) -> tuple[list[bytes], int, int]:
    """Frames of 8-bit RGB pixels with width and height. Raises `Refused`."""
    array, _ = _array(data)
    if array.ndim != 4 or 0 in array.shape:
        raise Refused(f"a video is T x C x H x W or T x H x W x C, not {tuple(array.shape)}")
    if array.shape[1] in (1, 3) and array.shape[3] not in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.shape[3] not in (1, 3):
        raise Refused(f"a video has 1 or 3 channels, not {array.shape[3]}")
    array = _eight_bits(array)
    if array.shape[3] == 1:
        array = array.repeat(3, axis=3)
    return [frame.tobytes() for frame in array], array.shape[2], array.shape[1]


def png(pixels: bytes, width: int, height: int, channels: int) -> bytes:
    """A PNG file of 8-bit pixels."""
    colour = {1: 0, 3: 2, 4: 6}[channels]
    stride = width * channels
    rows = b"".join(b"\0" + pixels[start : start + stride] for start in range(0, stride * height, stride))
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows, 6)) + _chunk(b"IEND", b"")


def gif(frames: list[bytes], width: int, height: int, fps: float) -> bytes:
    """An animated GIF of RGB frames. Raises `Refused` without pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise Refused("a video from an array needs pillow: pip install pillow; or log a file's path") from None
    pictures = [Image.frombytes("RGB", (width, height), frame) for frame in frames]
    out = io.BytesIO()
    pictures[0].save(
        out, "GIF", save_all=True, append_images=pictures[1:], duration=round(1000 / fps) if fps > 0 else 250, loop=0
    )
    return out.getvalue()


def wav(data: Any, sample_rate: int) -> bytes:
    """A WAV file of 16-bit samples. Raises `Refused`."""
    array, _ = _array(data)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or 0 in array.shape or array.shape[1] > 32:
        raise Refused(f"audio is N samples or N x channels, not {tuple(array.shape)}")
    if array.dtype.kind == "f":
        array = (array.clip(-1.0, 1.0) * 32767.0).round()
    elif array.dtype.kind not in "iu":
        raise Refused(f"audio of {array.dtype}")
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(array.shape[1])
        sound.setsampwidth(2)
        sound.setframerate(sample_rate)
        sound.writeframes(array.clip(-32768, 32767).astype("<i2").tobytes())
    return out.getvalue()


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _figure(figure: Any) -> tuple[bytes, int, int, int]:
    out = io.BytesIO()
    try:
        figure.savefig(out, format="rgba", dpi=figure.dpi)
        width, height = (round(length * figure.dpi) for length in figure.get_size_inches())
    except Exception as error:  # noqa: BLE001  # drawing is the user's and matplotlib's code
        raise Refused(f"the figure cannot be drawn: {error}") from None
    pixels = out.getvalue()
    if len(pixels) != width * height * 4:
        raise Refused(f"the figure drew {len(pixels)} bytes for {width} x {height} pixels")
    return pixels, width, height, 4


def _array(data: Any) -> tuple[Any, bool]:
    """A numpy array of its own, and whether channels come first by the library's habit."""
    first = hasattr(data, "detach")
    try:
        if first:
            data = data.detach().cpu()
            data = (data.float() if data.dtype.is_floating_point else data).numpy()
        import numpy as np

        array = np.array(data)
    except ImportError:
        raise Refused("arrays need numpy") from None
    except (TypeError, ValueError, RuntimeError) as error:
        raise Refused(f"{type(data).__name__} is no array: {error}") from None
    if array.size > MAX_PIXELS:
        raise Refused(f"{array.size} values are more than {MAX_PIXELS}")
    if array.dtype.kind not in "biuf":
        raise Refused(f"an array of {array.dtype} is no picture or sound")
    return array, first


def _eight_bits(array: Any) -> Any:
    import numpy as np

    if array.dtype.kind == "f":
        array = np.nan_to_num(array.astype("float64")).clip(0.0, 1.0) * 255.0
        return array.round().astype("uint8")
    if array.dtype.kind == "b":
        return array.astype("uint8") * np.uint8(255)
    return array.clip(0, 255).astype("uint8")
