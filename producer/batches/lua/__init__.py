"""The atomic operations on files and batches."""
