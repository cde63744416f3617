"""Samples in the formats of other programs: JSON lines, Parquet, traces."""
