"""Find the plan of a run: profile the module, search, try the plan that was found, and search again."""
