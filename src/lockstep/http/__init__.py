"""HTTP server and HTTP client, without anything of a dialect."""
