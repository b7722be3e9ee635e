"""Measurements of parts, run by hand; every script has ``--help`` and ends with a line ``RESULT {json}``."""
