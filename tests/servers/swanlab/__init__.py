"""A SwanLab server for tests: the endpoints that swanlab 0.10.3 uses, on loopback, with faults and lags.

It appends and never compares, as the real one is said to: a request that comes twice is stored twice, and
`Experiment.duplicates` shows it. Bodies that the real library would not send are refused with 400.
"""

from tests.servers.swanlab.faults import Fault
from tests.servers.swanlab.model import Experiment, Project
from tests.servers.swanlab.process import SwanLabServerProcess
from tests.servers.swanlab.rows import Duplicates, Row
from tests.servers.swanlab.server import API_KEY, USERNAME, SwanLabServer
from tests.servers.swanlab.settings import Settings

__all__ = [
    "API_KEY",
    "USERNAME",
    "Duplicates",
    "Experiment",
    "Fault",
    "Project",
    "Row",
    "Settings",
    "SwanLabServer",
    "SwanLabServerProcess",
]
