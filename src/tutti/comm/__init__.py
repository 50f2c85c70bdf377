"""What moves between ranks. The only room that calls collectives."""
