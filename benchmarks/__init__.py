"""Speed beside the peers that a user would pick instead: interleaved in one run, medians, ratios."""
