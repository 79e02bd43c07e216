"""`python -m tests.servers.swanlab_server`: the SwanLab test server in a process of its own.

Prints its url, serves until its standard input ends or a signal comes, and then prints one line of JSON with
the CPU time it used. The same server in-process is `SwanLabServer`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time

from tests.servers.swanlab import API_KEY, USERNAME, SwanLabServer, SwanLabServerProcess

__all__ = ["API_KEY", "USERNAME", "SwanLabServer", "SwanLabServerProcess", "main"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers.swanlab_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--trust-rows", action="store_true", help="store rows without looking at them")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="a field of Settings")
    options = parser.parse_args()
    settings = {name: json.loads(value) for name, _, value in (each.partition("=") for each in options.set)}
    if options.trust_rows:
        settings["check_rows"] = False

    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())

    def wait_for_end_of_input() -> None:
        sys.stdin.buffer.read()
        over.set()

    server = SwanLabServer(port=options.port, **settings)
    print(server.url, flush=True)
    threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    over.wait()
    report = {
        "cpu_s": time.process_time(),
        "num_bytes": sum(call.num_bytes for call in server.calls),
        "num_requests": len(server.calls),
    }
    server.stop()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
