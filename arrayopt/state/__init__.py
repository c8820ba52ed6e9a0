"""State that is kept between steps: slots, numbers of updates, and the loss scale."""
