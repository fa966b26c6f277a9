"""Speed relative to the libraries that a user would choose instead: medians and ratios of interleaved rounds."""
