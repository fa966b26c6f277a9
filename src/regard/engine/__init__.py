"""Generation with a model: stores for its states, sampling, a scheduler, and the engine. Token ids only, no text."""
