"""State-space mixers: a state of fixed size with a linear recurrence."""
