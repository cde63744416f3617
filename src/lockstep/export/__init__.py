"""Samples in the forms that other programs read: JSON lines, Parquet, traces."""
