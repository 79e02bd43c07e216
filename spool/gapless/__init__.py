"""Training metrics into an append-only spool."""
