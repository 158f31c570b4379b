"""The webhook queue: signed requests to customers' endpoints."""

from __future__ import annotations
