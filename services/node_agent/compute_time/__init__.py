"""Cores by GPU time: the library in containers, and the files by which the agent steers it."""
