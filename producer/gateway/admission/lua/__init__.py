"""The gateway's atomic operations, one `.lua` file each; `limits` loads them."""
