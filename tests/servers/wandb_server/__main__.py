"""`python -m tests.servers.wandb_server [--port N] [--state-file FILE]`: prints its url, serves until killed."""

from __future__ import annotations

import argparse
import contextlib
import signal
import threading

from tests.servers.wandb_server.server import WandbServer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.servers.wandb_server")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--state-file", help="keep every change here, and begin from what it holds")
    parser.add_argument("--any-key", action="store_true", help="let in every API key")
    args = parser.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with WandbServer(port=args.port, state_file=args.state_file) as server, contextlib.suppress(KeyboardInterrupt):
        if args.any_key:
            server.backend.valid_keys = None
        print(server.url, flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
