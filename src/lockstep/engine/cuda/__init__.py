"""Decoding on CUDA: Triton kernels, captured graphs, overlapped scheduling."""
