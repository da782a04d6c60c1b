"""NATS: the bus, its subjects and the wire form of events."""
