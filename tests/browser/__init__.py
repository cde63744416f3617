"""The dashboard and the report in a real browser."""
