"""Three models in, eight merged, tournaments, one winner out."""
