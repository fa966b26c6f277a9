"""Speed on one GPU relative to the libraries that a user would choose instead, in the same run."""
