"""After a power failure every synced row is there, and no row is wrong."""

from __future__ import annotations

import errno
import random
from hashlib import sha256
from pathlib import Path

import pytest

import gapless
from gapless import journal
from gapless_schemas import Damaged, Record, SegmentName, decode, decode_header
from tests.spool.children import row
from tests.spool.disk import Call, Disk
from tests.spool.powerloss import Model

CUTS_PER_RUN = 15


def sound(content: bytes) -> list[Record]:
    """The sound records of a segment that may be damaged anywhere; none without its header."""
    first, *lines = content.split(b"\n")
    try:
        decode_header(first)
    except Damaged:
        return []
    found = []
    for line in lines:
        try:
            found.append(decode(line))
        except Damaged:
            continue
    return found


def recorded_run(folder: Path, durability: str, chance: random.Random) -> tuple[Disk, list[tuple[int, int]]]:
    """A run of random length and faults, and after which call how many rows were promised to be on the disk."""
    folder.mkdir()
    disk = Disk(folder)
    failing = chance.choice([0.0, 0.2, 0.4])

    def before(call: Call) -> None:
        if call.name in ("fdatasync", "fsync") and chance.random() < failing:
            if call.name == "fdatasync":
                disk.journal.append(Call(call.number, "failed_sync", call.path))
            raise OSError(errno.EIO, "injected")
        if call.name == "write" and chance.random() < failing / 3:
            raise OSError(errno.ENOSPC, "injected")

    disk.before = before
    promised: list[tuple[int, int]] = []
    with disk.in_place():
        run = gapless.init("p", dir=folder / "spool", id="r", durability=durability)
        for number in range(chance.randint(5, 40)):
            if chance.random() < 0.06:
                run.log({"text": gapless.Text(f"{number} " * 150_000)})
            run.log({**row(number), "pad": "x" * chance.randint(0, 1500)})
            synced = durability == "sync" and run.stats().synced == run._ring.last.number
            if synced or (chance.random() < 0.2 and run.flush(5)):
                promised.append((len(disk.journal), number + 1))
        run.finish(timeout=20)
        assert run.stats().queued == 0
        promised.append((len(disk.journal), number + 1))
    return disk, promised


def lose_power(folder: Path, seeds: range, durability: str) -> None:
    disk, promised, chance = Disk(folder), [(0, 0)], random.Random()
    for seed in seeds:
        chance = random.Random(seed)
        if seed % CUTS_PER_RUN == 0:
            disk, promised = recorded_run(folder / str(seed), durability, random.Random(seed))
        cut = chance.randint(0, len(disk.journal))
        model = Model()
        model.play(disk.journal[:cut])
        found = model.after_power_loss(chance)
        rows: dict[int, Record] = {}
        for path, content in found.items():
            if SegmentName.parse(Path(path).name) is not None:
                rows.update((record.seq, record) for record in sound(content))
        logged = [record for _, record in sorted(rows.items()) if record.kind == "metrics"]
        for record in logged:
            number = int(record.data["n"])
            assert {**record.data, "pad": ""} == {**row(number), "pad": ""}, f"seed {seed}: a row nobody logged"
        kept = {int(record.data["n"]) for record in logged}
        safe = max((number for at, number in promised if at <= cut), default=0)
        assert kept >= set(range(safe)), f"seed {seed}: a synced row is missing"
        for record in rows.values():
            if record.kind == "text" and "media" in record.data:
                name = f"{folder / str(seed // CUTS_PER_RUN * CUTS_PER_RUN)}/spool/p/r/media/{record.data['media']}"
                assert sha256(found[name]).hexdigest() in record.data["media"], f"seed {seed}: a payload is not whole"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that retries at once and rotates early."""
    monkeypatch.setattr(journal, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(journal, "LAST_BACKOFF_S", 0.004)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 20_000)


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
def test_power_loss_spares_what_was_synced(tmp_path: Path, durability: str) -> None:
    """Whatever unsynced pages and names are dropped, zeroed or kept: synced rows are read back, none is wrong."""
    lose_power(tmp_path, range(120), durability)


@pytest.mark.torture
def test_five_thousand_power_losses(tmp_path: Path) -> None:
    """5,000 seeds over the three durabilities."""
    for durability, seeds in (("thread", range(2000)), ("write", range(2000, 3500)), ("sync", range(3500, 5000))):
        lose_power(tmp_path, seeds, durability)
