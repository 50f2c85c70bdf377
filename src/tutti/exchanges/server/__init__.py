"""Parameters that live on servers: processes of their own, which sum or apply what workers push."""
