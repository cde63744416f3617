"""Commands for a running gateway: state and control, keys, samples and the dashboard."""
