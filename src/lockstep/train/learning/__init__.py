"""The learner: batches, advantages, forward passes, expert replay and exactness."""
