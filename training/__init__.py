"""Makes drafters: answers of the target, a small model distilled on them, and the directory that serving loads.

Used by people, never by serving. See README.md in this directory.
"""
