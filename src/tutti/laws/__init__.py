"""Pure formulas, each with its source. Every room may import them; they import nothing of tutti."""
