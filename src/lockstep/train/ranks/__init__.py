"""Training on many ranks: FSDP2 with the bits of one rank, which rank 0 leads.

`launch.py` starts the ranks, `leader.py` is how rank 0 tells the others what to do next, and
`sharded_learner.py` is what each of them does.
"""
