"""Running a model: stores for what it remembers, sampling, a scheduler, the engine around them. Ids only, no text."""
