"""Switches by copies alone: known before the pause, and proven to be all that a reload does.

`load_trace`: what a model's loaders do, found out without data. `copy_plan`: the copies that follow
from it. `images`: layers that pack their weights. `fingerprint`: all that a model reads, to compare
two moments. `weight_loader` brings them together, and is what a rank's receiver loads with.
"""
