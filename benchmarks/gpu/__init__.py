"""Speed on one GPU, beside the peers that a user would pick instead, in the same run."""
