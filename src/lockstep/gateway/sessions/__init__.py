"""Sessions: stored turns, the cache of busy ones, limits and samples."""
