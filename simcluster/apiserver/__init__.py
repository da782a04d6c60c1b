"""The simulated API server: HTTP, requests, kinds, admission and storage."""
