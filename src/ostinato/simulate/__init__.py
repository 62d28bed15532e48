"""Replaying traces of requests on the real scheduler and cache, in virtual time and without bytes."""
