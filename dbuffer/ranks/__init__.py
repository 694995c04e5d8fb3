"""Ranks of one job that meet, and agree on what all of them do."""
