"""The atomic operations on webhook deliveries."""
