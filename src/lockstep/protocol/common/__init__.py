"""What all dialects share: strict decoding, errors, logprob entries, routed experts."""
