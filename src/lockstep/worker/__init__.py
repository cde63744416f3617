"""The process around an engine: its data port, its system port, and how it starts and stops."""
