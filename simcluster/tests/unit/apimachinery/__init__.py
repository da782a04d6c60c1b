"""Tests: unit, simcluster, apimachinery."""
