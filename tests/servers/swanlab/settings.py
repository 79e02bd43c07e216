"""What a test may turn. Every field can be set at any time, in-process or over `/_debug/settings`."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86400.0


@dataclass
class Settings:
    read_lag_s: float = 0.0
    """Rows younger than this are missing from every read and export."""
    summary_lag_s: float = 0.0
    """Rows younger than this are missing from the high-water marks that a resuming client asks for."""
    window: bool = True
    """Reads see only rows that came in between the `createdAt` of the query and the stop of the run."""
    silence_s: float = 1800.0
    """A running experiment that is not heard of for longer than this is closed as CRASHED."""
    session_s: float = 30 * DAY_S
    """How long a login lasts. The real client logs in again before each request when under 7 days are left."""
    max_rows: int | None = None
    """A metrics request with more rows than this is answered 413."""
    max_body_bytes: int | None = None
    """A request with a longer body than this is answered 413."""
    check_rows: bool = True
    """Metrics are parsed on arrival and refused (400) where no real client would send them. Off in benchmarks."""
    resume_renames: bool = False
    """A repeated experiment POST changes name, description, labels and colours; otherwise the first stand."""
    burn_deleted_ids: bool = False
    """A POST with the id of a deleted run is answered 404 `Disabled_Resource`; otherwise it makes a new run."""

    def update(self, changes: dict[str, object]) -> None:
        """Sets the named fields; AttributeError for a name there is not."""
        for name, value in changes.items():
            if not hasattr(self, name):
                raise AttributeError(f"no setting {name!r}")
            setattr(self, name, value)
