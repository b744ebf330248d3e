"""Tensor parallel: who holds what, and the processes of the ranks."""
