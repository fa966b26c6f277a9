"""One loop for every objective, and the directory that a run leaves: stopped or killed, it goes on exactly."""
