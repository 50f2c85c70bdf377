"""Communicators, process groups and collectives between ranks. The only room that calls collectives."""
