"""HTTP: the server, discovery, watches, exec, and the representations of objects."""
