"""Figures against the peers: `python -m benchmarks`."""
