"""The bodies of the Tinker API: JSON and protobuf, requests in and results out."""
