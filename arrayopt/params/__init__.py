"""What a user gives: trees of parameters and gradients, their names, and groups."""
