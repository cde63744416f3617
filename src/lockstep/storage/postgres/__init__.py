"""The store that any number of gateways share: one schema of a PostgreSQL database."""
