"""Number formats in which weights are stored with fewer bits."""
