"""A seeded campaign of kills against gateways, leader, store and workers, under load."""
