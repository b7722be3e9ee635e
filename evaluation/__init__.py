"""Measurements through the public API, run by hand; their results go to ``docs/log.md``."""
