"""Tests: integration, simcluster, controller_manager."""
