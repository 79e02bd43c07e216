"""`python -m gapless_uploader` is the `gapless` command."""

from gapless_uploader.command import main

main()
