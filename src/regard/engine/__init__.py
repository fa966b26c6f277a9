"""Running a model: stores for what it remembers, sampling, a scheduler, and the engine that ties them. Ids only, no text."""
