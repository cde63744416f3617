"""Integrations for other trainers and for Ray. Each imports only its own package."""
