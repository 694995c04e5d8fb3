"""Integrations with trainer frameworks and engines, one package for each.

Only the package of a framework imports that framework. The modules in this directory serve
all frameworks.
"""
