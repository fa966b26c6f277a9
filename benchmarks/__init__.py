"""Speed relative to the libraries that a user would choose instead: interleaved in one run, medians, ratios."""
