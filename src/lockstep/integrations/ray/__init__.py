"""A fleet whose workers are Ray actors, on any nodes of a Ray cluster."""

from __future__ import annotations

from lockstep.integrations.ray.ray_fleet import RayFleet

__all__ = ["RayFleet"]
