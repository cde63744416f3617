"""Commands for a gateway that runs: its state and control, keys, samples and live page."""
