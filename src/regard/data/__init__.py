"""Documents to batches: sources, the small world, packing, and a loader that knows its place."""
