"""The Kubernetes API: client, credentials, typed objects, list and watch."""
