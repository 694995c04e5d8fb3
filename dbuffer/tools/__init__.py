"""Command line of dbuffer."""
