"""Commands that train, or play rollouts for a trainer."""
