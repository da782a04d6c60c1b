"""The auth service: credentials of NATS and Redis, and authorization of NATS connections."""
