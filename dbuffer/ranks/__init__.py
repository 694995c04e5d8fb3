"""Ranks of one job that meet, and take steps together."""
