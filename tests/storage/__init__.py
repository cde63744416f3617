"""Stores: what every backend promises."""
