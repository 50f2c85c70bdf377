"""One state, whatever the strategy: what a model *is*, apart from where it lives."""
