"""One HTML file from the records of runs."""
