"""Callers and credentials: logins, TLS, authorization, serving certificates, turns and shares."""
