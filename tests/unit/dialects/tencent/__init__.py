"""Tests: unit, dialects, tencent."""
