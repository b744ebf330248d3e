"""Requests and what they become: sequences, groups, beams, and the checks before them."""
