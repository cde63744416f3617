"""The client that we speak HTTP with: connections that are kept, deadlines, retries, events."""
