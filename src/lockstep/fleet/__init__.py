"""Many workers: membership, routing, desired state and weight transactions."""
