"""The store of one gateway: two SQLite files in a directory, or everything in memory.

URLs: `memory:` and `sqlite:DIRECTORY`, both with an optional `?sessions=FILE` (or `memory`).
"""

MEMORY = "memory"
"""The path of a database in memory, for control and sessions."""
