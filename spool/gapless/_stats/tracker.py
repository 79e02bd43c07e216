"""A tracker: the words with which statistics are recorded and exported."""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, SupportsFloat, TypeVar, cast

import torch
from torch import Tensor

from gapless._stats.accumulate import Entry, Turn
from gapless._stats.layout import DENOMINATOR, SCALAR, ReduceType
from gapless._stats.pack import Exporter, Source
from gapless._stats.scopes import Scope, Scopes

if TYPE_CHECKING:
    import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class DistributedStatsTracker:
    """Statistics recorded under one name. Safe to record into from several threads at once.

    A tracker with a name puts it before every key, as an outermost scope.
    """

    def __init__(self, name: str = "") -> None:
        self._scopes = Scopes(name)
        self.source = Source(name)
        self._exporter = Exporter()

    def scope(self, name: str) -> Scope:
        """A context manager inside which `name/` stands before every key; nests. Per thread and async task."""
        return Scope(self._scopes, name)

    def scope_func_wrapper(self, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """A decorator whose function, plain or async, runs inside `scope(name)`."""

        def decorator(func: Callable[P, R]) -> Callable[P, R]:
            if inspect.iscoroutinefunction(func):

                @functools.wraps(func)
                async def wrapped_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                    with self.scope(name):
                        return await func(*args, **kwargs)

                return cast("Callable[P, R]", wrapped_coroutine)

            @functools.wraps(func)
            def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
                with self.scope(name):
                    return func(*args, **kwargs)

            return wrapped

        return decorator

    @contextmanager
    def disable_scope(self) -> Iterator[None]:
        """No name stands before a key inside, the tracker's own included; restored at the end, come what may."""
        stack = self._scopes.stack()
        self._scopes.replace(())
        try:
            yield
        finally:
            self._scopes.replace(stack)

    @contextmanager
    def record_timing(self, key: str) -> Iterator[None]:
        """Record the seconds spent inside as the scalar `timeperf/key`, whatever the scope; also on an exception."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - start_s
            self._record_scalars([(f"timeperf/{key}", elapsed_s)])

    def denominator(self, /, **masks: Tensor) -> None:
        """Record which elements count: non-empty bool tensors of any shape. Their sum is exported as a float.

        Statistics refer to a denominator's latest recording until it is recorded again or reset.
        Raises ValueError for anything else; then none of `masks` is recorded.
        """
        for key, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise ValueError(f"`{key}` must be a pytorch bool tensor: {_kind_of(mask)}")
            if mask.numel() == 0:
                raise ValueError(f"`{key}` must be non-empty")
            _check_has_values(key, mask)
        registry = self.source.registry
        full_keys = [self._scopes.full_key(key) for key in masks]
        with self.source.lock, torch.no_grad():
            for full_key in full_keys:
                registry.check(full_key, DENOMINATOR)
            for full_key, mask in zip(full_keys, masks.values(), strict=True):
                entry = registry.entry(full_key, DENOMINATOR)
                if entry.turn is None or entry.turn.weight.device != mask.device:
                    entry.turn = Turn(mask.device)
                entry.turn.begin(mask)
                bank = registry.bank(mask.device)
                bank.add_count(registry.slot(bank, full_key), entry.turn)

    def stat(self, /, denominator: str, reduce_type: ReduceType | None = None, **values: Tensor) -> None:
        """Record float tensors, each element where `denominator` was true at its latest recording.

        `reduce_type` is AVG_MIN_MAX if not given. Raises ValueError for a tensor that is empty or no float, a
        denominator that was not recorded, SCALAR or anything that is no ReduceType, and AssertionError for a
        shape other than the denominator's; then none of `values` is recorded.
        """
        if not values:
            return
        for key, value in values.items():
            if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
                raise ValueError(f"`{key}` should be a pytorch float tensor: {_kind_of(value)}")
            if value.numel() == 0:
                raise ValueError(f"`{key}` should be non-empty")
        kind = _kind(reduce_type)
        registry = self.source.registry
        mask_key = self._scopes.full_key(denominator)
        full_keys = [self._scopes.full_key(key) for key in values]
        with self.source.lock, torch.no_grad():
            turn = self._turn(mask_key)
            for full_key, value in zip(full_keys, values.values(), strict=True):
                if value.shape != turn.shape:
                    raise AssertionError((turn.shape, value.shape))
                if value.device != turn.mask.device:
                    raise ValueError(f"`{full_key}` is on {value.device}, `{mask_key}` on {turn.mask.device}")
                registry.check(full_key, kind)
            for full_key, value in zip(full_keys, values.values(), strict=True):
                entry = registry.entry(full_key, kind)
                bank = registry.bank(value.device)
                bank.add_masked(registry.slot(bank, full_key), value.detach(), turn)
                _note_turn(entry, turn, mask_key)

    def scalar(self, /, **values: SupportsFloat | str) -> None:
        """Record numbers; exported as their mean over all recordings on all ranks, with `key__count`.

        A tensor of one element stays on its device. Raises what `float` raises for what is no number.
        """
        self._record_scalars(
            [
                (self._scopes.full_key(key), value if isinstance(value, Tensor) else float(value))
                for key, value in values.items()
            ]
        )

    def export(
        self,
        key: str | None = None,
        reduce_group: dist.ProcessGroup | None = None,
        reset: bool = True,
        timeout: float | timedelta | None = None,
    ) -> dict[str, float]:
        """The rows of everything recorded since the last reset, or of one key, over all ranks of `reduce_group`.

        Without a group, in a world of one, or where torch.distributed is not initialised, the rows are this
        rank's own. With one, every rank of it must make the same call. A key that counted nothing on any rank
        has no row. `timeout`, in seconds, bounds the whole; without it the group's own limit holds.

        Raises ExportError on the ranks that wait when one does not come, and ValueError on all ranks when
        they recorded a key in different kinds; a ValueError keeps what was recorded.
        """
        full_key = None if key is None else self._scopes.full_key(key)
        name = self.source.name
        request = "export()" if full_key is None else f"export(key={full_key!r})"
        return self._exporter.export(
            [self.source],
            f"{request} of tracker {name!r}" if name else request,
            key=full_key,
            group=reduce_group,
            reset=reset,
            timeout_s=seconds(timeout),
        )

    def _record_scalars(self, numbers: Sequence[tuple[str, float | Tensor]]) -> None:
        for key, number in numbers:
            if isinstance(number, Tensor):
                if number.numel() != 1:
                    raise ValueError(f"`{key}` must have one element: {tuple(number.shape)}")
                _check_has_values(key, number)
        registry = self.source.registry
        with self.source.lock, torch.no_grad():
            for key, _ in numbers:
                registry.check(key, SCALAR)
            for key, number in numbers:
                registry.entry(key, SCALAR)
                if isinstance(number, Tensor):
                    bank = registry.bank(number.device)
                    bank.add_scalar(registry.slot(bank, key), number.detach())
                else:
                    host = registry.host()
                    host.add(registry.slot(host, key), number)

    def _turn(self, mask_key: str) -> Turn:
        entry = self.source.registry.entries.get(mask_key)
        if entry is None or not entry.is_live:
            raise ValueError(f"Denominator `{mask_key}` does not exist")
        if entry.turn is None:
            raise ValueError(f"`{mask_key}` is no denominator")
        return entry.turn


def _kind(reduce_type: ReduceType | None) -> int:
    if reduce_type is None:
        return ReduceType.AVG_MIN_MAX.value
    if reduce_type is ReduceType.SCALAR:
        raise ValueError("Cannot use the scalar reduce type for a tensor")
    if not isinstance(reduce_type, ReduceType):
        raise ValueError("reduce_type must be a ReduceType enum")
    kind: int = reduce_type.value
    return kind


def _kind_of(value: object) -> object:
    return value.dtype if isinstance(value, Tensor) else type(value)


def _check_has_values(key: str, tensor: Tensor) -> None:
    """Here and not at the export, where the other ranks would wait for this one."""
    if tensor.is_meta:
        raise ValueError(f"`{key}` is on the meta device: it has a shape and no values")


def _note_turn(entry: Entry, turn: Turn, mask_key: str) -> None:
    """Warn where a program records all its denominators first, and its statistics after them."""
    if entry.last_turn == turn.number and turn.num_unused:
        warnings.warn(
            f"`{entry.key}` was recorded twice after the latest of several of `{mask_key}`; each "
            "statistic counts by the latest one: record the denominator, then its statistics, turn by turn",
            stacklevel=3,
        )
    entry.last_turn = turn.number
    turn.is_used = True


def seconds(timeout: float | timedelta | None) -> float | None:
    """A time-out in seconds; None for none. Raises ValueError before any rank waits for another."""
    if timeout is None:
        return None
    found = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        raise ValueError(f"timeout={timeout!r}: say seconds above 0, a timedelta or None")
    return found
