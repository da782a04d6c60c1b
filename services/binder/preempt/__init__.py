"""Preemption: plans, rules, eviction and its announcements."""
