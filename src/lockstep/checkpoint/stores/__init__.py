"""Checkpoints in object stores: uploaded by a trainer, fetched by gateways and workers.

A checkpoint is a prefix, `s3://bucket/run/step-17`, with the files that its directory would have.
Its manifest has the size and SHA-256 of each, so that every file is checked before it is used.
`fetch.local_checkpoint` is the one place where a reference becomes a directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy_names import import_on_use

if TYPE_CHECKING:
    from lockstep.checkpoint.stores.upload_checkpoint import upload

__all__ = ["upload"]

__getattr__ = import_on_use(__name__, {"upload": "upload_checkpoint"})
