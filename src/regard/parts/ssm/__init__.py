"""State-space mixers: a state of fixed size that fades, is written and is read by linear rules."""
