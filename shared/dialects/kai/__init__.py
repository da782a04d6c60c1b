"""The annotations of KAI and Run:ai."""
