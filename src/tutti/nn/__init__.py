"""Building blocks inside a model, and what is done to modules from outside."""
