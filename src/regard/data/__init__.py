"""Documents to batches: sources, the simulated world, packing, and a loader whose state can be saved."""
