"""Results: from the reduced numbers of a layout to the rows a user sees.

The average is global sum over global count. A key that counted nothing gives no row. A NaN that was counted
anywhere shows in the average, the sum, the minimum and the maximum.
"""

from __future__ import annotations

from itertools import compress

import torch
from torch import Tensor

from gapless._stats.layout import DENOMINATOR, SCALAR, Layout, Name, ReduceType

NANS, SUM, COUNT, MAX, NEGMIN, AVG = range(6)
"""The rows of what is reduced: the first three by a sum, the next two by a maximum. AVG is made from them."""

_OUTPUTS: dict[int, tuple[tuple[str, int], ...]] = {
    DENOMINATOR: (("", COUNT),),
    SCALAR: (("", AVG), ("__count", COUNT)),
    ReduceType.AVG_MIN_MAX.value: (("/avg", AVG), ("/min", NEGMIN), ("/max", MAX)),
    ReduceType.AVG.value: (("", AVG),),
    ReduceType.SUM.value: (("", SUM),),
    ReduceType.MIN.value: (("", NEGMIN),),
    ReduceType.MAX.value: (("", MAX),),
}


class Results:
    """How the rows of one layout are read from its reduced numbers. Worked out once per layout."""

    def __init__(self, layout: Layout) -> None:
        self.names: list[str] = []
        self._owners: list[Name] = []
        self._whole: list[int] = []
        picks: list[int] = []
        evidence: list[int] = []
        num_keys = len(layout)
        for column, (name, kind) in enumerate(layout.kinds.items()):
            for suffix, row in _OUTPUTS[kind]:
                if suffix == "__count":
                    self._whole.append(len(self.names))
                self.names.append(name[1] + suffix)
                self._owners.append(name)
                picks.append(row * num_keys + column)
                # A denominator that was recorded and let nothing through is a true 0, so its recordings count.
                evidence.append((SUM if kind == DENOMINATOR else COUNT) * num_keys + column)
        self._picks = torch.tensor([picks, evidence], dtype=torch.int64, device="cpu").view(-1)
        self._are_names_unique = len(set(self.names)) == len(self.names)

    def read(self, numbers: Tensor) -> tuple[dict[str, float], set[Name] | None, list[str]]:
        """The rows, the keys that gave one (None for all), and the names that two trackers share.

        `numbers` has the rows NANS to NEGMIN and a column per key, on the host; it is used up.
        """
        extremes = numbers[MAX:]
        extremes[1].neg_()
        extremes.masked_fill_(numbers[NANS] > 0, torch.nan)
        flat = torch.cat((numbers.view(-1), numbers[SUM] / numbers[COUNT]))
        picked, evidence = flat.index_select(0, self._picks).view(2, -1)
        values: list[float] = picked.tolist()
        for at in self._whole:
            values[at] = int(values[at])
        counted = evidence > 0
        if counted.all():
            rows = dict(zip(self.names, values, strict=True))
            return rows, None, [] if self._are_names_unique else _repeated(self.names)
        kept = counted.tolist()
        names = list(compress(self.names, kept))
        rows = dict(zip(names, compress(values, kept), strict=True))
        return rows, set(compress(self._owners, kept)), [] if len(rows) == len(names) else _repeated(names)


def _repeated(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
