"""Rows for tests to write: business rows, and the side effects of handlers."""
