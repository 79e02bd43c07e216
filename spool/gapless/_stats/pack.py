"""Exports: from the banks of this rank to one matrix in the order of a layout, reduced, and back to rows.

The matrix has the rows NANS, SUM, COUNT, MAX, NEGMIN and a column per key. It is filled by one gather per bank
from the matrices that recording wrote, with the neutral column where this rank has no such key.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gapless._stats.accumulate import Bank, Entry, Registry
from gapless._stats.layout import Layout, Name
from gapless._stats.reduce import Conversation, Team, is_shared
from gapless._stats.result import MAX, NANS, NEGMIN, SUM, Results

if TYPE_CHECKING:
    import torch.distributed as dist

_NUM_SPARE_KEYS = 256
_LOG = logging.getLogger("gapless.stats")


class Source:
    """One tracker's recordings, with the lock that guards them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.registry = Registry()


class Exporter:
    """Exports of the same trackers, time after time. Remembers what the ranks of each group agreed on.

    Exports over one group must come in the same order on all its ranks, as all collectives must.
    """

    def __init__(self) -> None:
        self._alone = Agreement(None)
        self._agreements: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()

    def export(
        self,
        sources: Sequence[Source],
        request: str,
        *,
        key: str | None,
        group: dist.ProcessGroup | None,
        reset: bool,
        timeout_s: float | None,
    ) -> dict[str, float]:
        """The rows of all keys of all sources, or of one key of one source, reduced over `group`."""
        return self._agreement(group).export(sources, request, key, group, reset, timeout_s)

    def _agreement(self, group: dist.ProcessGroup | None) -> Agreement:
        if group is None or not is_shared(group):
            return self._alone
        known = self._agreements.get(group)
        if known is None:
            known = self._agreements[group] = Agreement(Team(group))
        return known


class Agreement:
    """The layout that the ranks of one group share, and where this rank's columns go in it."""

    def __init__(self, team: Team | None) -> None:
        self._team = team
        self._device = torch.device("cpu") if team is None else team.device
        self._layout = Layout({})
        self._num_exports = 0
        self._strangers: tuple[object, list[tuple[Source, Entry]]] = (None, [])
        self._plans: dict[int, Plan] = {}
        self._results: tuple[Layout, Results] | None = None
        self._spare: list[Tensor] = []

    def export(
        self,
        sources: Sequence[Source],
        request: str,
        key: str | None,
        group: dist.ProcessGroup | None,
        reset: bool,
        timeout_s: float | None,
    ) -> dict[str, float]:
        """Agree, pack, reduce, read; see `Exporter.export`."""
        self._num_exports += 1
        layout = self._proposal(sources)
        talk = None
        if self._team is not None and group is not None:
            talk = Conversation(self._team, group, request, self._num_exports, timeout_s)
            layout = talk.agree(layout, lambda: _live(sources))
        self._layout = layout
        if key is not None:
            layout = layout.only([(sources[0].name, key)])
        if not len(layout):
            return {}
        numbers = self._packed(sources, layout, reset, key)
        if talk is not None:
            talk.reduce(numbers)
        results = self._results_of(layout)
        rows, present, repeated = results.read(numbers.cpu())
        self._spare = [numbers]
        if repeated:
            _LOG.warning("two trackers export the same names, the later one wins: %s", repeated)
        if key is None and present is not None and len(layout) > 2 * len(present) + _NUM_SPARE_KEYS:
            # Every rank sees the same rows, so every rank forgets the same keys.
            self._layout = layout.only(present)
        return rows

    def _proposal(self, sources: Sequence[Source]) -> Layout:
        """The agreed layout, extended by what was recorded since the last export and is not in it."""
        seen = (self._layout, tuple((source.name, source.registry.version) for source in sources))
        if self._strangers[0] != seen:
            strangers = []
            for source in sources:
                with source.lock:
                    strangers += [
                        (source, entry)
                        for entry in source.registry.entries.values()
                        if self._layout.kinds.get((source.name, entry.key)) != entry.kind
                    ]
            self._strangers = (seen, strangers)
        new = {(source.name, entry.key): entry.kind for source, entry in self._strangers[1] if entry.is_live}
        return self._layout.extended(new) if new else self._layout

    def _packed(self, sources: Sequence[Source], layout: Layout, reset: bool, key: str | None) -> Tensor:
        numbers = self._matrix(layout)
        is_filled = False
        for source in sources:
            with source.lock:
                plan = self._plan(source, layout)
                for bank, columns in plan.columns:
                    if not is_filled and bank.device == self._device:
                        torch.index_select(bank.matrix, 1, columns, out=numbers[SUM:])
                        is_filled = True
                        continue
                    part = bank.matrix.index_select(1, columns).to(self._device)
                    if is_filled:
                        numbers[SUM:MAX].add_(part[:2])
                        torch.maximum(numbers[MAX:], part[2:], out=numbers[MAX:])
                    else:
                        numbers[SUM:].copy_(part)
                        is_filled = True
                if reset:
                    _reset(source, plan, key)
        if not is_filled:
            numbers[SUM:MAX].zero_()
            numbers[MAX:].fill_(-torch.inf)
        # A maximum over ranks may lose a NaN, a sum cannot: NaNs go there, and come back after the reduction.
        has_nan = numbers[MAX].isnan()
        numbers[NANS].copy_(has_nan)
        numbers[MAX:].masked_fill_(has_nan, -torch.inf)
        return numbers

    def _plan(self, source: Source, layout: Layout) -> Plan:
        registry = source.registry
        known = self._plans.get(id(source))
        if known is not None and known.version == registry.version and known.layout is layout:
            return known
        columns = []
        for bank in registry.banks():
            ours = [
                bank.slots[key].index if name == source.name and key in bank.slots else 0 for name, key in layout.kinds
            ]
            if any(ours):
                columns.append((bank, torch.tensor(ours, dtype=torch.int64, device=bank.device)))
        outside = [entry for key, entry in registry.entries.items() if (source.name, key) not in layout.kinds]
        plan = self._plans[id(source)] = Plan(registry.version, layout, columns, outside)
        return plan

    def _matrix(self, layout: Layout) -> Tensor:
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = None
        if spare is not None and spare.shape[1] == len(layout):
            return spare
        with torch.inference_mode(False):
            return torch.empty(NEGMIN + 1, len(layout), dtype=torch.float64, device=self._device)

    def _results_of(self, layout: Layout) -> Results:
        if self._results is None or self._results[0] is not layout:
            self._results = (layout, Results(layout))
        return self._results[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """For each bank of a source that has keys of the layout: its column for each of the layout's, 0 for none.

    `outside` are the keys that the source has and the layout has not. Holds for one version of the registry.
    """

    version: int
    layout: Layout
    columns: list[tuple[Bank, Tensor]]
    outside: list[Entry]


def _live(sources: Sequence[Source]) -> set[Name]:
    names = set()
    for source in sources:
        with source.lock:
            names |= {(source.name, entry.key) for entry in source.registry.live}
    return names


def _reset(source: Source, plan: Plan, key: str | None) -> None:
    """Forget what was packed; what another thread recorded since the proposal, under a new key, is kept."""
    registry = source.registry
    if key is not None:
        registry.reset_key(key)
    elif any(entry.is_live for entry in plan.outside):
        for packed in [entry.key for entry in registry.live if (source.name, entry.key) in plan.layout.kinds]:
            registry.reset_key(packed)
    else:
        registry.reset()
