"""Admission: refuses pods that could not be granted or would free themselves, completes others."""
