"""Why did the accuracy drop: a ladder of runs that differ in one thing each, its table and its verdict."""
