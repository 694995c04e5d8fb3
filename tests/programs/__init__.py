"""Programs that tests run in processes of their own; there is no test in it."""
