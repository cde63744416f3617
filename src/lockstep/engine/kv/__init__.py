"""Keys and values: slots of running sequences and cached prefixes."""
