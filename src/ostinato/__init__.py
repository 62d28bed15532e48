"""Ostinato: an LLM inference engine in which a prompt's prefix is not computed twice."""

from __future__ import annotations

__version__ = "0.1.0"
