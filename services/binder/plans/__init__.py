"""The planner's plans, carried out: evictions, hand-over of devices, Events."""
