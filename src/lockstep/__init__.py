"""Lockstep keeps an RL trainer and a fleet of LLM inference workers in lockstep."""

from importlib.metadata import version

__version__ = version("lockstep-rl")
