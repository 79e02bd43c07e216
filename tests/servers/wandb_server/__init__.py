"""A W&B server on loopback that the real client works against, for tests and benchmarks.

It models what the client's protocol needs: runs with lines by offset, media and table artifacts, resume, rewind,
`wandb sync` and reading back through `wandb.Api`. What the hosted service does beyond the protocol is not known
here; where it matters, it is a switch (`replaces_equal_steps`, `upsert_revives`, `can_rewind`, `lag`).
"""

from tests.servers.wandb_server.backend import DEFAULT_KEY
from tests.servers.wandb_server.faults import Fault
from tests.servers.wandb_server.messages import Request
from tests.servers.wandb_server.process import ServerProcess
from tests.servers.wandb_server.server import WandbServer
from tests.servers.wandb_server.state import CRASHED_AFTER_S, Lag, Run, Staleness

__all__ = [
    "CRASHED_AFTER_S",
    "DEFAULT_KEY",
    "Fault",
    "Lag",
    "Request",
    "Run",
    "ServerProcess",
    "Staleness",
    "WandbServer",
]
