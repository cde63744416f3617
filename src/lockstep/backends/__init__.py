"""Drivers of inference servers: one folder per engine, behind the same two protocols."""
