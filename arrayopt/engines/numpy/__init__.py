"""The engine `numpy`, which runs plans as NumPy calls on blocks that fit in cache."""
