"""The disk tier: a cache of KV records in preallocated files that survives restarts.  See ``docs/disk-format.md``."""
