"""Steps of an optimizer: from gradients to launches."""
