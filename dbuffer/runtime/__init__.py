"""Needs of long-lived objects: checked options, retries with a log, timings."""
