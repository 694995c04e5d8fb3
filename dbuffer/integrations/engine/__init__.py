"""Following a store with an inference engine, whichever: what all of them share."""
