"""One flow for every strategy: the step, the loop around it, and what they record."""
