"""Imported last by the process that children are forked off.

A fork inherits how far its parent is from its next garbage collection, so that, by chance, every
child began with one. Such a collection goes through all that was ever imported and copies each
page of it: half a second of work for a child that lives for a hundredth of one.
"""

import gc

gc.collect()
gc.freeze()
