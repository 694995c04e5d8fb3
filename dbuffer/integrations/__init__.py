"""Integrations with trainer frameworks and engines, one package for each.

Only the package of a framework imports the framework. The modules beside the packages serve several
of them.
"""
