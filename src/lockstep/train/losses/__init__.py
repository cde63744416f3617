"""Losses: one file for each, and the table that `lockstep train` and the Tinker API choose from."""
