"""From a recipe to a member: the one place where merging meets training."""
