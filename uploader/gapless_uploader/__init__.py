"""The uploader and the `gapless` command."""
