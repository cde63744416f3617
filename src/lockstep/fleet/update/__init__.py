"""The weight transaction, its proof, and how a worker is brought up."""
