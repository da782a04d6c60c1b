"""Tests: the manifests, by kubectl in every combination of their parts."""
