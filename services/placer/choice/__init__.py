"""The choice of node and devices for pods and gangs."""
