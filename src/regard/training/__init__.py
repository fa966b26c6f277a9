"""Training: one loop for every objective, recipes, and run directories that can be resumed exactly."""
