"""Attacks on live processes: a gateway and a worker, over raw sockets."""
