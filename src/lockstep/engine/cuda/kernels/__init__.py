"""Triton kernels, each with what it computes in plain torch beside it."""
