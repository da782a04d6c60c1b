"""A service's life: settings, start, handlers, telemetry, health, stop."""
