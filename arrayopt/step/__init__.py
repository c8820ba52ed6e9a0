"""A step: from gradients to launches."""
