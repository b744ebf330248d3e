"""The atomic operations of the protocol, one `.lua` file each; `scripts` loads and calls them.

`prelude.lua` is not an operation: its local functions stand before each of the others.
"""
