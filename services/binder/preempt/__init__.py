"""Preemption: rules, plans, steps, evictions and their announcements."""
