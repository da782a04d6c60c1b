"""Events and request-reply messages that travel on NATS."""
