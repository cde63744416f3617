"""What GPUs have that are not here."""

from __future__ import annotations

LIMITS = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a program may have, by compute capability: A100, L4 and RTX 40, H100,
B200, RTX 50."""
