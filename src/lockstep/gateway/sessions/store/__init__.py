"""Where sessions are kept: an SQLite file of one gateway, or PostgreSQL for any number of them."""
