"""Ostinato's cache hierarchy inside of other engines."""
