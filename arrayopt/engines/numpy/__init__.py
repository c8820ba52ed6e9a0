"""The NumPy engine: blocks that stay in cache."""
