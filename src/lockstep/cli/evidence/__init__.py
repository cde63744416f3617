"""Commands on recorded runs: replay, bisect, audit and pack."""
