"""More than one process: offline batches, replicas behind one address, and planning for more of both."""
