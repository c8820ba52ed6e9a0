"""`Monitor`: statistics of each layer during training."""
