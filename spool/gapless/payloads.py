"""Tables, texts, histograms, images, videos, audio and files: what does not fit a number.

Constructors do no work and raise nothing: what cannot be kept is counted and warned about when it is logged. A payload
is copied when it is logged, so the caller may go on changing it; a `File` soon after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Table:
    """Rows of cells under named columns. `log_mode` is passed on to trackers that know one."""

    def __init__(
        self,
        columns: Iterable[Any] | None = None,
        data: Iterable[Iterable[Any]] | None = None,
        *,
        dataframe: Any = None,
        log_mode: str | None = None,
    ) -> None:
        if dataframe is not None:
            columns = list(dataframe.columns)
            data = dataframe.itertuples(index=False, name=None)
        self.columns: list[Any] = list(columns or ())
        self.data: list[list[Any]] = [list(row) for row in data or ()]
        self.log_mode = log_mode

    def add_data(self, *cells: Any) -> None:
        """Add one row."""
        self.data.append(list(cells))


class Text:
    """A text of any length."""

    def __init__(self, text: Any) -> None:
        self.text = text


class Histogram:
    """Counts of values between edges: from `values` into `bins`, or given as `counts` (n) and `edges` (n + 1)."""

    def __init__(self, values: Any = None, *, bins: int = 64, counts: Any = None, edges: Any = None) -> None:
        self.values = values
        self.bins = bins
        self.counts = counts
        self.edges = edges


class _Source:
    """What `Image`, `Video`, `Audio` and `File` share: a path, encoded bytes, or values to encode."""

    def __init__(self, data: Any, *, caption: str | None = None, format: str | None = None) -> None:  # noqa: A002
        self.data = data
        self.caption = caption
        self.format = format


class Image(_Source):
    """A path, encoded bytes, a PIL image, a figure, or an array.

    Arrays are H x W, H x W x C or (tensors) C x H x W with C 1, 3 or 4. Integers are 0 to 255, floats 0 to 1.
    """


class Video(_Source):
    """A path, encoded bytes, or an array T x C x H x W or T x H x W x C of `fps` frames a second (needs pillow)."""

    def __init__(
        self,
        data: Any,
        *,
        fps: float = 4.0,
        caption: str | None = None,
        format: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(data, caption=caption, format=format)
        self.fps = fps


class Audio(_Source):
    """A path, encoded bytes, or samples: N or N x channels, floats from -1 to 1 or 16-bit integers."""

    def __init__(
        self,
        data: Any,
        *,
        sample_rate: int = 16_000,
        caption: str | None = None,
        format: str | None = None,  # noqa: A002
    ) -> None:
        super().__init__(data, caption=caption, format=format)
        self.sample_rate = sample_rate


class File(_Source):
    """A file, copied by the writer soon after it was logged. At most 1 GiB."""

    def __init__(self, path: Any, *, name: str | None = None, caption: str | None = None) -> None:
        super().__init__(path, caption=caption)
        self.name = name
