"""Everything that does I/O: the wire, the bus, Redis, Kubernetes."""
