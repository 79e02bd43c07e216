"""`python -m gapless_uploader` is `gapless`."""

from gapless_uploader.cli import main

main(prog_name="gapless")
