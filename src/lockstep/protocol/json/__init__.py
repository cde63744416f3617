"""JSON of bodies: strict decoding, limits, and lazy decoding of large arrays."""
