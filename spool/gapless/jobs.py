"""The run id of a job, kept in the spool, so that a requeued or restarted job goes on with its run."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from time import sleep

from gapless.segment import create_file, make_folders, open_file, open_folder, sync_folder
from gapless_schemas import path_name

JOBS = ".jobs"
_TRIES = 100


def job_run_id(project_folder: Path, job: str, fresh: str, unique: str) -> str:
    """The run id kept under `job`, or `fresh` once it is kept there: racing processes all get one id.

    `unique` names a temporary file of this process alone. Raises OSError.
    """
    folder = project_folder / JOBS
    make_folders(folder, 2)
    name = path_name(job)
    with open_folder(folder) as at:
        kept = _read(at, name)
        if kept:
            return kept
        temporary = f".{unique}"
        fd = create_file(temporary, at)
        try:
            try:
                data = fresh.encode()
                if os.write(fd, data) != len(data):
                    raise OSError("the disk took a part of the id only")
                os.fdatasync(fd)
            finally:
                os.close(fd)
            _put(at, temporary, name)
        finally:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=at)
        for _ in range(_TRIES):
            kept = _read(at, name)
            if kept:
                break
            sleep(0.01)
        else:
            raise OSError(errno.EIO, "the job's run id is not whole", str(folder / name))
    sync_folder(folder)
    return kept


def _put(at: int, temporary: str, name: str) -> None:
    """Give the temporary its name, unless another process was first."""
    try:
        # A link, not a rename: it fails where the name is taken, and the id is whole when it shows.
        os.link(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without links: whoever makes the file writes the id, the others wait for it to be whole.
        with suppress(FileExistsError):
            os.close(create_file(name, at))
            os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)


def _read(at: int, name: str) -> str:
    try:
        fd = open_file(name, at)
    except FileNotFoundError:
        return ""
    try:
        return os.read(fd, 4096).decode("utf-8", "replace").strip()
    finally:
        os.close(fd)
