"""The learner: batches, losses, expert replay, and whether it can be exact."""
