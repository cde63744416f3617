"""Bodies of the control plane: of one worker, and of a fleet."""
