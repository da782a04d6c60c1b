"""The lease protocol as a state machine: real ledger, real services, messages in a bag."""
