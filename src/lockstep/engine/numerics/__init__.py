"""Which bits a process computes: MKL modes, row multiples, block shapes, self-test."""
