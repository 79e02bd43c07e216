"""Gapless inside other trainers: `gapless.integrations.transformers` and `gapless.integrations.lightning`.

Each imports its trainer's package when it is imported itself, and nothing else of Gapless imports it.
"""
