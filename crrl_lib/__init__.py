"""Context refinement for search agents: the library behind the notebooks."""
