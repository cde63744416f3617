"""Rows of the conformance kit, one module per group."""
