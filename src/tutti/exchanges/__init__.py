"""How replicas agree. An exchange owns the update of the parameters."""
