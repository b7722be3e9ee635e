"""The lean forward as one C++ file: compiled once for the machine it runs on, called through a plain C interface."""
