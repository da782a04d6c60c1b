"""The objects that the API server serves for us: their kinds, their HTTP server, and its trust."""
