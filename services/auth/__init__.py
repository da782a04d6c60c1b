"""Credentials of NATS and Redis, and authorization of NATS connections."""
