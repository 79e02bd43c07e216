"""The collectives of an export, and what is said when a rank does not come. The only file that knows
`torch.distributed`.

An export makes at most three collectives: a digest of the proposed layout, a sum and a maximum of the numbers. In
a small group one gather takes the place of the last two. Where the digests differ, two more come between: the
longest proposal's length, and all proposals. Nothing whose length depends on a layout is sent before all ranks
have the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gapless._stats.layout import Layout, Name, merged, ranks_label
from gapless._stats.result import MAX

_PATIENCE_S = 1.0
"""How long a rank waits before it leaves word of where it waits; also how long it looks for such word."""
_POLL_S = 0.0002
_MAX_GATHERED_BYTES = 256 * 1024
"""Up to here every rank gathers all numbers and reduces them itself: a quarter of two ring reductions' messages."""


class ExportError(RuntimeError):
    """A rank did not come to an export, or was lost in it. The process group is of no use afterwards."""


def is_shared(group: dist.ProcessGroup) -> bool:
    """Whether there is another rank to talk to: not in a world of one, nor where nothing is initialised.

    Raises ValueError on a rank outside of the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return False
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        raise ValueError("this rank is not in reduce_group; its own numbers are in export(reduce_group=None)")
    return bool(dist.get_world_size(group) > 1)


class Team:
    """The ranks of one process group, and the device on which they talk. Keeps no hold of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self.device, self.blocks_host = _device(group)
        self.name = str(getattr(group, "group_name", ""))


def _device(group: dist.ProcessGroup) -> tuple[torch.device, bool]:
    """Where the group's collectives take their tensors, and whether waiting for one blocks the host.

    The choice depends on the group alone, never on what a rank recorded: all ranks must choose the same.
    """
    backends = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    if "cpu" in backends:
        return torch.device("cpu"), True
    kind = next(iter(backends))
    return torch.device(kind, getattr(torch, kind).current_device()), False


class Conversation:
    """The collectives of one export, on one rank."""

    def __init__(
        self, team: Team, group: dist.ProcessGroup, request: str, number: int, timeout_s: float | None
    ) -> None:
        self._team = team
        self._group = group
        self._request = request
        self._number = number
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._has_announced = False

    def agree(self, proposal: Layout, live: Callable[[], set[Name]]) -> Layout:
        """The layout that all ranks reduce by: the proposal if it is everybody's, else the merged ones.

        Raises ValueError on all ranks if they asked for different exports or differ in a key's kind.
        """
        num_ranks = len(self._team.ranks)
        # One element, since gloo is twice as quick for one as for two. The sum of all cannot wrap round, and is
        # the multiple of a rank's own only if all are the same, but for a chance of one in 2^50.
        mine = proposal.digest(self._request) >> num_ranks.bit_length()
        if self._reduced(mine, dist.ReduceOp.SUM) == mine * num_ranks:
            return proposal
        num_bytes = self._reduced(proposal.num_payload_bytes(self._request), dist.ReduceOp.MAX)
        sent = bytearray(proposal.payload(self._request, live()).ljust(num_bytes, b"\0"))
        payload = torch.frombuffer(sent, dtype=torch.uint8).to(self._team.device)
        received = [torch.empty_like(payload) for _ in self._team.ranks]
        self._wait(dist.all_gather(received, payload, group=self._group, async_op=True))
        return merged([_bytes(tensor) for tensor in received], self._team.ranks)

    def _reduced(self, number: int, operation: Any) -> int:
        word = torch.tensor([number], dtype=torch.int64, device=self._team.device)
        self._wait(dist.all_reduce(word, op=operation, group=self._group, async_op=True))
        return int(word)

    def reduce(self, numbers: Tensor) -> None:
        """Reduce the rows of `numbers` over all ranks, in place."""
        num_ranks = len(self._team.ranks)
        if numbers.nbytes * num_ranks <= _MAX_GATHERED_BYTES:
            parts = torch.empty((num_ranks, *numbers.shape), dtype=numbers.dtype, device=numbers.device)
            self._wait(dist.all_gather(list(parts.unbind()), numbers, group=self._group, async_op=True))
            torch.sum(parts[:, :MAX], dim=0, out=numbers[:MAX])
            torch.amax(parts[:, MAX:], dim=0, out=numbers[MAX:])
            return
        summed = dist.all_reduce(numbers[:MAX], op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        largest = dist.all_reduce(numbers[MAX:], op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._wait(summed)
        self._wait(largest)

    def _wait(self, work: dist.Work | None) -> None:
        """Wait for a collective; raise ExportError when it fails or the time is over."""
        if work is None:
            return
        first_s = _PATIENCE_S if self._timeout_s is None else min(_PATIENCE_S, self._timeout_s / 4)
        try:
            if self._done_within(work, first_s):
                return
            self._announce()
            if self._deadline_s is None:
                work.wait()
            elif not self._done_within(work, self._deadline_s - time.monotonic()):
                raise TimeoutError
        except TimeoutError as error:
            raise ExportError(self._complaint(f"within {self._timeout_s:g} s")) from error
        except RuntimeError as error:
            self._announce()
            raise ExportError(self._complaint(f"before the group gave up ({error})")) from error
        self._take_back()

    def _done_within(self, work: dist.Work, patience_s: float) -> bool:
        patience_s = max(patience_s, 0.001)
        if self._team.blocks_host:
            try:
                work.wait(timedelta(seconds=patience_s))
            except RuntimeError:
                # The same error says "not yet" and "failed", but only what is over can be waited for without end.
                if not work.is_completed():
                    return False
                work.wait()
            return True
        end_s = time.monotonic() + patience_s
        while not work.is_completed():
            if time.monotonic() > end_s:
                return False
            time.sleep(_POLL_S)
        work.wait()
        return True

    def _place(self, rank: int) -> str:
        return f"gapless/export/{self._team.name}/{rank}"

    def _word(self) -> str:
        return f"{self._request}, call {self._number}"

    def _announce(self) -> None:
        """Leave word, in the store that the group was made with, of the export at which this rank waits."""
        if not self._has_announced:
            self._has_announced = self._leave(self._word())

    def _take_back(self) -> None:
        if self._has_announced:
            # Emptied, not deleted: to ask a store for a key that has just gone is to wait for it.
            self._leave("")
            self._has_announced = False

    def _leave(self, word: str) -> bool:
        try:
            _store().set(self._place(self._team.rank), word)
        except RuntimeError:
            # A store that is gone is no reason to fail an export that may still succeed without it.
            return False
        return True

    def _complaint(self, limit: str) -> str:
        waiting, elsewhere, missing = self._whereabouts()
        parts = [f"{self._word()}, over {len(self._team.ranks)} ranks: "]
        if missing is None:
            parts.append(f"not every rank came {limit}, and the store that would tell which does not answer")
        elif missing or elsewhere:
            who = [f"{ranks_label([rank])} waits at {word}" for rank, word in elsewhere.items()]
            if missing:
                who.insert(0, f"{ranks_label(missing)} did not come {limit}")
            parts.append("; ".join(who) + f"; {ranks_label(waiting)} waited")
        else:
            parts.append(f"all ranks came, but not all finished {limit}")
        parts.append(". Every rank of the group must call the export, not only those under `if rank == 0:`.")
        return "".join(parts)

    def _whereabouts(self) -> tuple[list[int], dict[int, str], list[int] | None]:
        """Ranks that wait at this export, ranks that wait at another, and ranks without word (None: unknown)."""
        end_s = time.monotonic() + _PATIENCE_S
        try:
            store = _store()
            while True:
                places = {rank: self._place(rank) for rank in self._team.ranks}
                words = {rank: store.get(at).decode() for rank, at in places.items() if store.check([at])}
                words = {rank: word for rank, word in words.items() if word}
                if len(words) == len(self._team.ranks) or time.monotonic() > end_s:
                    break
                time.sleep(_PATIENCE_S / 20)
        except RuntimeError:
            return [], {}, None
        waiting = [rank for rank, word in words.items() if word == self._word()]
        elsewhere = {rank: word for rank, word in words.items() if word != self._word()}
        return waiting, elsewhere, [rank for rank in self._team.ranks if rank not in words]


def _store() -> Any:
    # torch has no public name for the store that the default group was made with.
    return dist.distributed_c10d._get_default_store()


def _bytes(tensor: Tensor) -> bytes:
    memory = bytearray(len(tensor))
    torch.frombuffer(memory, dtype=torch.uint8).copy_(tensor)
    return bytes(memory)
