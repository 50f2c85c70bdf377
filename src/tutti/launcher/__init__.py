"""Launch the processes of a job, watch them, report failures; ``tutti.init`` joins a job."""
