"""Integrations: a package for each trainer framework and engine, which only that package imports.

The modules here are for several frameworks and engines.
"""
