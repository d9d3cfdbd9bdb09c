"""A small data set in six languages, written for this project, so that everything runs with no download."""
