"""The HTTP faces of a fleet: every existing client can point here, and no token is lost."""
