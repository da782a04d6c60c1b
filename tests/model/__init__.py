"""The lease protocol as a state machine: real scripts and real services, messages in a bag."""
