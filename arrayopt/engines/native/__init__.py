"""What the engines for CPUs that compile a plan share: the table of tensors, and how threads and
ranks share it.
"""
