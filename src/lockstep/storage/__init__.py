"""Shared storage: the PostgreSQL database that several gateways stand on."""
