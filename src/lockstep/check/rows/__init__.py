"""The rows of the conformance kit, one module per group."""
