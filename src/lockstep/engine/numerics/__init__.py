"""Arithmetic that gives the engine and a trainer the same logprobs on a CPU, bit for bit.

A matrix library sums in an order that depends on shapes and threads. Exactness takes five steps:
1. `mkl` puts MKL into its reproducible mode before the first product. `mkl_choice` tests which mode
   holds on CPUs for which MKL gives no guarantee. `bf16` keeps bf16 products from crashing.
2. `block_shapes` tests which shapes keep the bits: the row multiple that matrix products are padded
   to, and the numbers of queries and keys in attention.
3. `invariance` proves them on the model's own weights: a sequence in any chunks and any batch, and
   a trainer's forward pass (`trainer_path`). If that fails, the engine's arithmetic is `close`.
4. `plan` describes the result, with a fingerprint of the bits. A trainer compares it with its own.
5. `selftest` runs all of this, and the transformers module, for `lockstep doctor` and tests.
"""
