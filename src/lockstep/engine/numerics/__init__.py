"""How a CPU is made to give the same logprobs to engine and trainer, bit for bit.

A matrix library sums in an order that depends on shapes and threads. So, in this order:
1. `mkl` puts MKL into its reproducible mode, before the first product; `mkl_choice` finds which
   mode holds on a CPU whose maker promises none. `bf16` keeps bf16 from ending the process.
2. `block_shapes` finds by trial the shapes that keep the bits: the row multiple to which rows of a
   model's products are padded, and the numbers of queries and keys that attention may take.
3. `invariance` proves them on the model's own weights: a sequence in any pieces and any batch, and
   the forward pass of a trainer (`trainer_path`). Where that fails, the engine is `close`.
4. `plan` says what came of it, with a fingerprint of the bits; a trainer compares it with its own.
5. `selftest` runs all of it, and the transformers module itself, for `lockstep doctor` and tests.
"""
