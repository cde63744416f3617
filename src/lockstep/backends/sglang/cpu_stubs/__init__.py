"""A folder for PYTHONPATH of SGLang servers without a GPU: see `sitecustomize`."""
