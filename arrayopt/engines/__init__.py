"""Engines, which run a rule's update over a bucket of tensors. `step/` calls them."""
