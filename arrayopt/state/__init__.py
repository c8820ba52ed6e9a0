"""What lasts from step to step: slots, numbers of updates, the loss scale."""
