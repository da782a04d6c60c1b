"""The command bundle: what support needs of a cluster, without secrets, and names on request."""
