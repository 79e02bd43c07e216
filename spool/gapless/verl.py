"""Run verl with its logging into the spool: `python -m gapless.verl -m verl.trainer.main_ppo trainer.logger=...`.

The program after `-m` (a module) or in its place (a script) runs as if it had been started alone, after
`gapless.tracking.install()`; under Ray the same is done in every worker process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from gapless._fronts.ray_hook import prepare
from gapless.config import read_environment
from gapless.tracking import install

USAGE = "usage: python -m gapless.verl (-m MODULE | SCRIPT) [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Run the program that `arguments` name. Raises what the program raises, SystemExit(2) where none is named."""
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(f"{USAGE}\n\n{__doc__}")
        return
    as_module = arguments[:1] == ["-m"]
    program = arguments[1:] if as_module else arguments
    if not program or (not as_module and program[0].startswith("-")):
        sys.stderr.write(f"{USAGE}\n")
        raise SystemExit(2)
    # Workers may start in other folders: all write to the one spool of the process that was started.
    root = Path(read_environment().root or "gapless").absolute()
    prepare(os.environ, str(root))  # type: ignore[arg-type]  # os.environ is no dict, and is one for our purposes
    install()
    if as_module:
        sys.argv = program
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).parent.absolute())
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
