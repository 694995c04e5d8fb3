"""Integrations with trainer frameworks and engines, one package for each.

Only the package of a framework imports the framework. Several packages share the modules in this
directory.
"""
