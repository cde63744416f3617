"""Parts shared by all dialects: errors, logprob entries, routed experts, sampling fields."""
