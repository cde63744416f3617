"""A served fleet under mixed load for a long time: nothing of it may grow."""
