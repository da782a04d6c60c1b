"""Credentials and certificates: logins, TLS, authorization, serving certificates."""
