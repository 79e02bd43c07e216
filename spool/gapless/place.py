"""Where an attempt writes: its run's folder, its id and number, and the names and headers of its segments.

All work on the disk is done by whoever writes, step by step, and taken up again where it failed.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from socket import gethostname
from threading import Lock
from time import time
from uuid import uuid4

from gapless.attempt import claim_attempt, last_step, put_claim
from gapless.jobs import job_run_id
from gapless.ring import Ring
from gapless.segment import Segment, make_folders
from gapless.store import Store
from gapless_schemas import CLAIMS, Header, SegmentName, encode_header, path_name


class Place:
    """One attempt's place in the spool. Only `settle_id` is called by others than the writer."""

    def __init__(
        self,
        root: Path,
        project: str,
        run_id: str | None,
        writer: str,
        resume_step: int | bool | None,
        *,
        job: str | None,
        fresh_id: str,
    ) -> None:
        self.run_id = run_id
        """None until the job's file was read."""
        self.attempt_id = uuid4().hex
        self.created = time()
        self._project = project
        self._project_folder = root / path_name(project)
        self._writer = writer
        self._writer_path = path_name(writer)
        self._resume_step = resume_step
        self._job = job
        self._fresh_id = fresh_id
        self._id_lock = Lock()
        self._number: int | None = None
        self._segment = 0
        self._host = gethostname()
        self._pid = os.getpid()
        self._boot_id = _boot_id()
        self._store: Store | None = None

    @property
    def folder(self) -> Path:
        """The run's folder; the project's while the run id is not known."""
        return self._project_folder if self.run_id is None else self._project_folder / path_name(self.run_id)

    @property
    def store(self) -> Store:
        """The run's payloads."""
        if self._store is None:
            self._store = Store(self.folder, self.attempt_id)
        return self._store

    def settle_id(self) -> str:
        """The run id; the fresh one where the job's file could not be read in time."""
        with self._id_lock:
            if self.run_id is None:
                self.run_id = self._fresh_id
            return self.run_id

    def prepare(self, ring: Ring) -> None:
        """Make folders, find the id and the number, and tell the ring its first step. Raises OSError."""
        if self.run_id is None:
            assert self._job is not None  # noqa: S101  # no id only where a job is to tell it
            found = job_run_id(self._project_folder, self._job, self._fresh_id, self.attempt_id)
            with self._id_lock:
                if self.run_id is None:
                    self.run_id = found
        folder = self.folder
        make_folders(folder, 3 if self._number is None else 0)
        if folder.is_symlink():  # nothing is made behind a link
            raise OSError(errno.ELOOP, "the run's folder is a link")
        if self._number is None:
            self._number = claim_attempt(folder, self._writer_path, self.attempt_id)
        else:
            claims = folder / CLAIMS
            if not claims.is_dir():
                make_folders(claims, 1)
                put_claim(folder, self._writer_path, self._number, self.attempt_id)
        if ring.base_step is None:
            last = last_step(folder, self._writer_path, self._number)
            ring.base_step = 0 if last is None else last + 1

    def new_segment(self, first_seq: int) -> Segment:
        """Create the next segment. Raises OSError."""
        assert self.run_id is not None  # noqa: S101  # `prepare` came first
        assert self._number is not None  # noqa: S101
        while True:
            name = SegmentName(self._writer_path, self._number, self.attempt_id[:8], self._segment)
            header = Header(
                project=self._project,
                run_id=self.run_id,
                writer=self._writer,
                attempt=self._number,
                attempt_id=self.attempt_id,
                segment=self._segment,
                first_seq=first_seq,
                host=self._host,
                pid=self._pid,
                boot_id=self._boot_id,
                created=self.created,
                resume_step=self._resume_step,
            )
            try:
                segment = Segment(self.folder, str(name), encode_header(header))
            except FileExistsError:
                self._segment += 1
                continue
            self._segment += 1
            return segment


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return ""
