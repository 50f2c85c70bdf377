"""Write an HTML report, one file, from the run directories of one or several runs."""
