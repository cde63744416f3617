"""Commands that train, or run rollouts for a trainer."""
