"""Imported first by the process that children are forked off; `frozen.py`, the last, undoes it."""

import gc

gc.disable()
