"""Recording: the mergeable state of each key, on the device of what was recorded.

A bank holds the keys of one tracker on one device as columns of a float64 matrix with the rows SUM, COUNT,
MAX and NEGMIN (the negated minimum). A recorded statistic costs six kernels, no synchronisation, and no
memory that lasts. Column 0 is never recorded into: it is what a rank sends for a key that it does not have.

A NaN that is counted stays in MAX and NEGMIN, where torch's reductions let it win; packing takes it out.
Nothing here is thread safe: the tracker's lock guards it.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless._stats.layout import DENOMINATOR, SCALAR, kind_label

NUM_ROWS = 4
_FIRST_NUM_SLOTS = 64
_NUM_SPARE_KEYS = 256
_TURN_NUMBERS = itertools.count(1)


class Slot:
    """One column of a bank, as the two views that recording writes into."""

    __slots__ = ("extremes", "index", "weight")

    def __init__(self, index: int, matrix: Tensor) -> None:
        self.index = index
        self.aim(matrix)

    def aim(self, matrix: Tensor) -> None:
        """Point the views at `matrix`."""
        self.weight = matrix[:2, self.index]
        self.extremes = matrix[2:, self.index]


class Bank:
    """The states of one tracker's keys on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots: dict[str, Slot] = {}
        self._num_slots = _FIRST_NUM_SLOTS
        self.matrix = self._neutral()
        with torch.inference_mode(False):
            self._one = torch.ones(2, dtype=torch.float64, device=device)
            self._signs = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64, device=device)
            self._fills = torch.tensor([0.0, -torch.inf, -torch.inf], dtype=torch.float64, device=device)
        self._by_num_dims: dict[int, tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    def slot(self, key: str) -> Slot:
        """The key's column, made at its first use."""
        slot = self.slots.get(key)
        if slot is None:
            if len(self.slots) + 1 == self._num_slots:
                self._grow()
            slot = self.slots[key] = Slot(len(self.slots) + 1, self.matrix)
        return slot

    def add_masked(self, slot: Slot, value: Tensor, turn: Turn) -> None:
        """Count the elements of `value` that the mask of `turn` lets through: six kernels."""
        if value.ndim == 0:
            value = value.reshape(1)
        signs, fills, dims = self._constants(value.ndim)
        widened = torch.mul(value, signs)
        # A masked-out NaN or infinity is replaced, never multiplied away: 0 * NaN is NaN.
        torch.where(turn.mask, widened, fills, out=widened)
        plain, both_signs = widened.split_with_sizes([1, 2])
        torch.sum(plain, dim=dims, out=turn.weight[:1])
        slot.weight.add_(turn.weight)
        torch.maximum(slot.extremes, both_signs.amax(dim=dims), out=slot.extremes)

    def add_count(self, slot: Slot, turn: Turn) -> None:
        """Count the mask of `turn` itself; SUM then holds the number of recordings."""
        turn.weight[:1].fill_(1.0)
        slot.weight.add_(turn.weight)

    def add_scalar(self, slot: Slot, value: Tensor) -> None:
        """Count one number that lies on the device: two kernels."""
        self._one[:1].copy_(value.reshape(1))
        slot.weight.add_(self._one)

    def reset(self) -> None:
        """Back to what a rank without recordings has."""
        self.matrix[:2].zero_()
        self.matrix[2:].fill_(-torch.inf)

    def reset_slot(self, key: str) -> None:
        """The same for one key; without effect for a key that is not here."""
        if key in self.slots:
            self.slots[key].weight.zero_()
            self.slots[key].extremes.fill_(-torch.inf)

    def _constants(self, num_dims: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        if num_dims not in self._by_num_dims:
            shape = (3,) + (1,) * num_dims
            dims = tuple(range(1, num_dims + 1))
            self._by_num_dims[num_dims] = (self._signs.view(shape), self._fills.view(shape), dims)
        return self._by_num_dims[num_dims]

    def _grow(self) -> None:
        old, num_old = self.matrix, self._num_slots
        self._num_slots *= 2
        self.matrix = self._neutral()
        self.matrix[:, :num_old].copy_(old)
        for slot in self.slots.values():
            slot.aim(self.matrix)

    def _neutral(self) -> Tensor:
        # Recording may happen in inference mode; a tensor made there could not be written outside of it.
        with torch.inference_mode(False):
            matrix = torch.zeros(NUM_ROWS, self._num_slots, dtype=torch.float64, device=self.device)
            matrix[2:].fill_(-torch.inf)
            return matrix


class HostBank(Bank):
    """The bank of plain numbers: the same matrix, over memory that Python adds to without a kernel."""

    def __init__(self) -> None:
        self._memory = array("d")
        super().__init__(torch.device("cpu"))

    def add(self, slot: Slot, value: float) -> None:
        """Count one number."""
        self._memory[slot.index] += value
        self._memory[self._num_slots + slot.index] += 1.0

    def _neutral(self) -> Tensor:
        self._memory = array("d", bytes(8 * NUM_ROWS * self._num_slots))
        with torch.inference_mode(False):
            matrix = torch.frombuffer(self._memory, dtype=torch.float64).view(NUM_ROWS, self._num_slots)
            matrix[2:].fill_(-torch.inf)
            return matrix


class Turn:
    """The latest recording of a denominator: its mask, and [a sum's place, the mask's count] in float64."""

    __slots__ = ("is_used", "mask", "num_unused", "number", "shape", "weight")

    def __init__(self, device: torch.device) -> None:
        self.num_unused = 0
        self.is_used = True
        with torch.inference_mode(False):
            self.weight = torch.ones(2, dtype=torch.float64, device=device)

    def begin(self, mask: Tensor) -> None:
        """Take a copy of `mask` in place of the one before."""
        self.num_unused += not self.is_used
        self.is_used = False
        self.number = next(_TURN_NUMBERS)
        self.shape = mask.shape
        self.mask = mask.detach().clone()
        if not self.shape:
            self.mask = self.mask.reshape(1)
        self.weight[1:].copy_(self.mask.sum())


@dataclass(slots=True)
class Entry:
    """What a tracker knows of one key."""

    key: str
    kind: int
    is_live: bool = False
    turn: Turn | None = None
    last_turn: int = 0


class Registry:
    """The keys of one tracker. `version` rises whenever a key, a kind or a column is new."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.live: list[Entry] = []
        self._on_device: dict[torch.device, Bank] = {}
        self._of_numbers: HostBank | None = None
        self.version = 0

    def check(self, key: str, kind: int) -> None:
        """Raise ValueError if `key` was recorded as something else than `kind` since the last export.

        A statistic may change its reduce type: the latest holds.
        """
        entry = self.entries.get(key)
        if entry is None or not entry.is_live or entry.kind == kind:
            return
        if kind in (DENOMINATOR, SCALAR) or entry.kind in (DENOMINATOR, SCALAR):
            raise ValueError(f"`{key}` was recorded as {kind_label(entry.kind)} and cannot be {kind_label(kind)} too")

    def entry(self, key: str, kind: int) -> Entry:
        """The key's entry, marked as recorded since the last export."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, kind)
            self.version += 1
        elif entry.kind != kind:
            entry.kind = kind
            self.version += 1
        if not entry.is_live:
            entry.is_live = True
            self.live.append(entry)
        return entry

    def bank(self, device: torch.device) -> Bank:
        """The bank on `device`."""
        bank = self._on_device.get(device)
        if bank is None:
            bank = self._on_device[device] = Bank(device)
        return bank

    def host(self) -> HostBank:
        """The bank of plain numbers."""
        if self._of_numbers is None:
            self._of_numbers = HostBank()
        return self._of_numbers

    def banks(self) -> list[Bank]:
        """All banks."""
        return [*self._on_device.values(), *([self._of_numbers] if self._of_numbers else [])]

    def slot(self, bank: Bank, key: str) -> Slot:
        """The key's column in `bank`."""
        slot = bank.slots.get(key)
        if slot is None:
            slot = bank.slot(key)
            self.version += 1
        return slot

    def reset(self) -> None:
        """Forget every recording; keys unused for long are forgotten too."""
        for bank in self.banks():
            bank.reset()
        for entry in self.live:
            entry.is_live = False
            entry.turn = None
        if len(self.entries) > 2 * len(self.live) + _NUM_SPARE_KEYS:
            self.entries.clear()
            self._on_device.clear()
            self._of_numbers = None
            self.version += 1
        self.live = []

    def reset_key(self, key: str) -> None:
        """Forget the recordings of one key."""
        for bank in self.banks():
            bank.reset_slot(key)
        entry = self.entries.get(key)
        if entry is not None and entry.is_live:
            entry.is_live = False
            entry.turn = None
            self.live.remove(entry)
