"""Sessions: turns stored in a file, a cache of the busy ones, limits, expiry and samples."""
