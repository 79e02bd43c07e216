"""The inside of `gapless.stats_tracker`: recording, layouts, packing, and the one file that talks to other ranks."""
