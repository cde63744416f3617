"""Stores: what outlives a gateway process, behind four protocols and opened by URL.

One folder per backend. See `protocols` for what a store promises.
"""

from lockstep.storage.store import Store, open_store

__all__ = ["Store", "open_store"]
