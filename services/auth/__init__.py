"""AuthService: makes secrets and certificates, and says who it is that comes to NATS."""
